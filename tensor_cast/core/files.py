"""Writing result files."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from tensor_cast.errors import ConfigError


def write_atomically(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` whole or not at all.

    Raises:
        ConfigError: the folder does not exist or cannot be written to.
    """
    try:
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; give a path in a folder that exists") from None
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        # mkstemp makes the file private; give it the permissions an ordinary new file would have.
        mask = os.umask(0)
        os.umask(mask)
        Path(temporary).chmod(0o666 & ~mask)
        Path(temporary).replace(path)
    except OSError as error:
        Path(temporary).unlink(missing_ok=True)
        raise ConfigError(f"cannot write {path}: {error.strerror}; give a path to a file") from None
