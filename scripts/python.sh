#!/bin/sh
# Prints the path of a Python that set-up can use: 3.11 first, because the lock was written and tested with it.
# KVMESH_PYTHON overrides the choice.
names=${KVMESH_PYTHON:-python3.11 python3.12 python3.13 python3}
for name in $names; do
  path=$(command -v "$name") || continue
  # A name on PATH may be a launcher for a version that is not installed, so the program itself reports the version.
  if "$path" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    echo "$path"
    exit 0
  fi
  seen="$seen $name ($("$path" -c 'import platform; print(platform.python_version())' 2>/dev/null || echo 'does not run'))"
done
if [ -n "${KVMESH_PYTHON:-}" ]; then
  echo "kvmesh needs Python 3.11 or later; KVMESH_PYTHON names$([ -n "$seen" ] && echo "$seen" || echo " $KVMESH_PYTHON, which is not there")." >&2
  exit 1
fi
echo "kvmesh needs Python 3.11 or later; found:${seen:- none of $names on PATH}." >&2
echo "Install it (Debian 12, Ubuntu 24.04 and later: apt-get update && apt-get install python3 python3-venv) or set KVMESH_PYTHON." >&2
exit 1
