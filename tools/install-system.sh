#!/usr/bin/env bash
# Installs what tests use and pip has not, where this user may, else says how: bubblewrap, by which
# code that a model wrote is isolated, and Chromium, in which reports are looked at. Never fails:
# what needs one of them says so itself.
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
echo "not here: ${missing[*]}; tests that need them are left out. To have them:"
echo "  sudo apt install ${missing[*]}"
exit 0
