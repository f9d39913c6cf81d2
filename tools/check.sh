#!/usr/bin/env bash
# Checks lint, format, import ranks and types, and prints the time of each. Runs all checks, and fails
# if any of them fails. Usage: tools/check.sh FOLDER, the folder with the programs of the tools.
set -uo pipefail
programs=$1
failed=()
TIMEFORMAT='  %R s'
run() {
  echo "$*"
  time "$programs/$1" "${@:2}" || failed+=("$*")
}
run ruff check
run ruff format --check
run lint-imports --no-logo
run mypy
if [ "${#failed[@]}" -gt 0 ]; then
  printf 'failed: %s\n' "${failed[@]}" >&2
  exit 1
fi
