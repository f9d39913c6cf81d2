#!/usr/bin/env bash
# Makes the virtual environment FOLDER with Python 3.11 or newer, unless a working one exists.
# Usage: tools/make-venv.sh FOLDER [PYTHON]
set -euo pipefail
folder=$1
shift
candidates=("$@")
[ "${#candidates[@]}" -gt 0 ] || candidates=(python3.11 python3.12 python3.13 python3 python)

if "$folder/bin/python" -m pip --version >/dev/null 2>&1; then
  exit 0
fi

# Runs each candidate: a name on PATH may be a wrapper for a Python that is not installed.
chosen=
for name in "${candidates[@]}"; do
  if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
    chosen=$name
    break
  fi
done
if [ -z "$chosen" ]; then
  echo "error: no Python 3.11 or newer among: ${candidates[*]}" >&2
  echo "install one, or give its path: make install PYTHON=/path/to/python3.11" >&2
  exit 1
fi
if ! "$chosen" -c 'import ensurepip, venv' >/dev/null 2>&1; then
  echo "error: $chosen has no venv module; on Debian and Ubuntu: apt install python3-venv" >&2
  exit 1
fi
echo "$folder: $("$chosen" --version)"
"$chosen" -m venv --clear "$folder"
