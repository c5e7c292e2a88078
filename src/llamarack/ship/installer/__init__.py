"""Installs a bundle on a server without a network: `install.sh` runs it, with a bare Python 3.11 or newer.

Standard library only. A bundle holds these modules as they are, in one file that Python runs (`program`).
Everything goes into one folder, the prefix:

    PREFIX/bin/llamarack            what to call; PREFIX/bin/llamarack-install accept | undo | uninstall
    PREFIX/current -> versions/X    the version in use
    PREFIX/previous -> versions/W   the one before, kept until `accept`
    PREFIX/versions/X/              python/ (a virtual environment), engines/NAME/, bin/, llamarack-install.json
    PREFIX/models/                  shared by the versions

After that nothing in it is written any more: it may be read-only and belong to another user.
"""
