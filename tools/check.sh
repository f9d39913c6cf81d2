#!/usr/bin/env bash
# Lint, format, import ranks and types, each with its time. All run; any failure fails the whole.
# Usage: tools/check.sh FOLDER, where FOLDER holds the tools' programs.
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
