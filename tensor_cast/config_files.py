"""The data files of the product: devices, engines and models under ``configs/``.

In a checkout they sit at the top of the repository; a wheel carries them inside the package, as
``tensor_cast/_configs``. This module finds them in both, and turns whatever is wrong with a file into one line.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from tensor_cast.errors import ConfigError

if TYPE_CHECKING:
    from pydantic import ValidationError

# libyaml parses several times faster; a PyYAML built without it still works.
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@cache
def config_root() -> Path:
    """The folder that holds ``devices``, ``engines`` and ``models``.

    Raises:
        ConfigError: neither the installed package nor a checkout around it has the files.
    """
    package = Path(__file__).resolve().parent
    for folder in (package / "_configs", package.parent / "configs"):
        if (folder / "devices").is_dir():
            return folder
    raise ConfigError(
        f"the configuration files are missing: neither {package / '_configs'} nor {package.parent / 'configs'} "
        "has them; reinstall the package"
    )


def yaml_names(kind: str) -> dict[str, Path]:
    """File of each YAML configuration of ``kind`` (``devices``, ``engines``) by its lower-case stem."""
    return {path.stem: path for path in sorted((config_root() / kind).glob("*.yaml"))}


def is_path(name: str) -> bool:
    """Whether ``name`` means a file of the user's own rather than an embedded configuration."""
    return name.lower().endswith((".yaml", ".yml")) or Path(name).is_file()


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file.

    Raises:
        ConfigError: the file cannot be read, is not YAML, or is not a mapping.
    """
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}; give the path of a YAML file") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not a text file in UTF-8: {error.reason} at byte {error.start}") from error
    except yaml.YAMLError as error:
        where = getattr(error, "problem_mark", None)
        line = f" at line {where.line + 1}, column {where.column + 1}" if where else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ConfigError(f"{path} is not valid YAML{line}: {problem}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold a mapping of fields to values; it holds {_found(content)}")
    return content


def explain(path: Path | str, error: ValidationError) -> ConfigError:
    """One line for a file that does not fit its schema: what is missing, what was found and is not allowed.

    A rule over several fields says itself what it found; the whole file is never shown.
    """
    problems = error.errors(include_url=False)
    missing = [_field(problem["loc"]) for problem in problems if problem["type"] == "missing"]
    others = [problem for problem in problems if problem["type"] != "missing"]
    texts = []
    if missing:
        texts.append(f"field{'s' * (len(missing) > 1)} {', '.join(missing)} {'are' if missing[1:] else 'is'} missing")
    if others:
        first, field = others[0], _field(others[0]["loc"])
        allowed = first["msg"].removeprefix("Value error, ")
        if first["type"] == "extra_forbidden":
            texts.append(f"field {field} is unknown")
        elif not first["loc"]:
            texts.append(allowed)
        else:
            texts.append(f"field {field}: found {_found(first['input'])}; {allowed[:1].lower()}{allowed[1:]}")
    more = f" (and {len(others) - 1} more)" if len(others) > 1 else ""
    return ConfigError(f"{path}: {'; '.join(texts)}{more}")


def _field(location: tuple[int | str, ...]) -> str:
    return ".".join(map(str, location))


def _found(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
