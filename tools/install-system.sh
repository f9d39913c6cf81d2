#!/usr/bin/env bash
# Installs programs that tests use and pip does not provide: bubblewrap isolates code that a model
# wrote, and Chromium shows reports. Without the rights to install, prints the command. Never fails:
# tests that need a missing program are skipped.
set -u
missing=()
command -v bwrap >/dev/null || missing+=(bubblewrap)
command -v chromium >/dev/null || command -v google-chrome >/dev/null || missing+=(chromium)
[ "${#missing[@]}" = 0 ] && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  echo "installing ${missing[*]}"
  install() { apt-get install -y -q --no-install-recommends "${missing[@]}"; }
  { install || { apt-get update -q && install; }; } >/dev/null 2>&1 && exit 0
fi
echo "not installed: ${missing[*]}; tests that need them are skipped. To install them:"
echo "  sudo apt install ${missing[*]}"
exit 0
