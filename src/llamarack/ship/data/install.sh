#!/bin/sh
# Installs this bundle without a network: sh install.sh [--prefix DIR]. Needs only Python; --help tells the rest.
set -eu
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
wanted=$(sed -n 's/^  "python": "\(.*\)",$/\1/p' "$here/bundle.json")
for python in "${PYTHON:-}" "python$wanted" python3; do
  [ -n "$python" ] || continue
  command -v "$python" >/dev/null 2>&1 || continue
  if [ "$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" = "$wanted" ]; then
    exec "$python" -I "$here/install.pyz" "$@"
  fi
done
echo "error: this bundle is for Python $wanted, and no python$wanted was found" >&2
echo "hint: PYTHON=/path/to/python$wanted sh $0, or make the bundle with --python for the Python that is here" >&2
exit 3
