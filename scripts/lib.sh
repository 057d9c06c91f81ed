# shellcheck shell=bash
# Shared by the scripts: the checkout's path, the search for a Python, and the stamp that shows whether a virtual
# environment is complete and up to date. Source it by its full path.

root=${BASH_SOURCE[0]%/scripts/lib.sh}

# usable_python COMMAND [VERSION]: prints the real path of COMMAND if it is Python 3.11 or newer (or VERSION, if given) and
# can make virtual environments. Runs COMMAND, because a version manager's shim may exist and not work.
usable_python() {
    "$1" - "${2:-}" 2>/dev/null <<'PYTHON'
import ensurepip, os, sys, venv
found, wanted = "%d.%d" % sys.version_info[:2], sys.argv[1]
if sys.version_info < (3, 11) or wanted not in ("", found):
    sys.exit(1)
print(os.path.realpath(sys.executable))
PYTHON
}

# find_python VERSION...: prints the path of the first usable Python, from PATH or from pyenv's versions.
find_python() {
    local version command
    for version in "$@"; do
        while IFS= read -r command; do
            if usable_python "$command" "$version"; then return; fi
        done < <(
            type -ap "python$version" python3
            compgen -G "${PYENV_ROOT:-${HOME:-}/.pyenv}/versions/$version.*/bin/python$version" | sort -rV
        )
    done
    return 1
}

# why_no_python VERSION...: prints what to install after find_python found nothing.
why_no_python() {
    local command
    for command in "${@/#/python}" python3; do
        if "$command" -c 'import sys; sys.exit("%d.%d" % sys.version_info[:2] not in sys.argv)' "$@" 2>/dev/null; then
            echo "$command lacks the venv and ensurepip modules;" \
                "on Debian and Ubuntu: apt-get install python3-venv"
            return
        fi
    done
    local wanted="$*"
    echo "no Python ${wanted// / or } found on PATH or in pyenv; install one:" \
        "pyenv install $1, or Debian's and Ubuntu's own by apt-get install python3-venv"
}

# venv_is_sound VENV PYTHON: true if VENV was completed in this checkout, and with PYTHON unless PYTHON is empty.
venv_is_sound() {
    local stamp=()
    [[ -x $1/bin/python && -f $1/jaxrun-stamp ]] && mapfile -t -n 2 stamp <"$1/jaxrun-stamp" &&
        [[ ${stamp[0]} == "$root" && (-z $2 || ${stamp[1]} == "$2") ]]
}

# venv_is_current VENV PYTHON CONTENTS: true if VENV is sound and has CONTENTS ("extras requirements..."; "a" is part of
# "a,b") for the present pyproject.toml. The stamp is compared as text, without starting a process.
venv_is_current() {
    local stamp=() project=()
    venv_is_sound "$1" "$2" || return 1
    mapfile -t -s 2 stamp <"$1/jaxrun-stamp"
    mapfile -t project <"$root/pyproject.toml"
    [[ ${stamp[0]} == "$3" || ${stamp[0]} == "$3,"* ]] && [[ "${stamp[*]:1}" == "${project[*]}" ]]
}

# quietly COMMAND...: runs it, and shows its output only if it fails.
quietly() {
    local printed status=0
    printed=$("$@" 2>&1) || status=$?
    if [[ $status != 0 ]]; then printf '%s\n' "$printed" >&2; fi
    return "$status"
}

# install_packages PACKAGE...: with apt-get, as root.
install_packages() {
    DEBIAN_FRONTEND=noninteractive quietly apt-get --quiet=2 update &&
        DEBIAN_FRONTEND=noninteractive quietly apt-get --quiet=2 install --yes --no-install-recommends "$@"
}

# install_debian RELEASE DIRECTORY PACKAGE,...: puts a small Debian into the directory, as root. From the mirror that apt
# uses, if that is one of Debian's. With the script of sid, as an older debootstrap has none for a newer release.
install_debian() {
    local mirror
    command -v debootstrap >/dev/null || install_packages debootstrap || return
    # shellcheck disable=SC2016 # the name is apt's
    mirror=$(apt-get indextargets --format '$(SITE)' 'Created-By: Packages' | sed -n '/\/debian\/\?$/{p;q}')
    rm -rf "$2"
    quietly debootstrap --variant=minbase --include="$3" "$1" "$2" "${mirror:-http://deb.debian.org/debian}" \
        /usr/share/debootstrap/scripts/sid
}
