"""Files and directories of this user that the launcher and the ranks both use, checked against other users' hands."""
