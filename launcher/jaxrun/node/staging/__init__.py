"""--stage: directories of a slow file system, copied to the local disks of all hosts."""
