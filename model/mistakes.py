"""What was wrong with what people typed, in one sentence."""

from __future__ import annotations

import re

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException, OverrideParseException
from omegaconf import OmegaConf

from model.config import CONF, flat_keys, nearest


def explained(error: Exception, config_name: str, given: list[str]) -> str:
    """What is wrong, without what a terminal would obey."""
    text = _sentence(error, config_name, given)
    return "".join(character if character.isprintable() else " " for character in text)


def _sentence(error: Exception, config_name: str, given: list[str]) -> str:
    """What Hydra and OmegaConf say over several lines, as one sentence with the nearest valid name."""
    text = str(error)
    unknown = re.search(r"Could not override '([^']*)'", text)
    if unknown and re.match(r"position[./]scaling", unknown[1]):
        scaled = [path.stem for path in (CONF / "position").glob("*.yaml") if "scaling:" in path.read_text()]
        return (
            f"{unknown[1]}: not a key here; position={', '.join(sorted(scaled))} can be scaled, "
            f"by position/scaling=<name>, which has keys of its own"
        )
    if unknown:
        return f"{unknown[1]}: unknown key{nearest(unknown[1], _valid_keys(config_name, given))}"
    group = re.search(r"Could not find '([^']*)/([^'/]*)'", text)
    if group:
        options = [path.stem for path in (CONF / group[1]).glob("*.yaml")]
        return f"{group[1]}={group[2]}: no such option{nearest(group[2], options)}"
    if isinstance(error, OverrideParseException):
        return f"{error.override}: cannot be parsed as key=value; put quotes around special characters"
    if text.startswith("Config group override"):
        return "a config group takes the name of an option, not null or a value; no position is position=none"
    missing = re.search(r"Missing mandatory value: (\S+)", text)
    if missing:
        key = getattr(error, "full_key", None) or missing[1]
        return f"{key}: missing; give {key}=<value>"
    return " ".join(text.split())


def _valid_keys(config_name: str, given: list[str]) -> list[str]:
    """All keys of the configuration with the groups that the user chose."""
    groups = {path.name for path in CONF.iterdir() if path.is_dir()}
    chosen = [argument for argument in given if (CONF / argument.split("=")[0]).is_dir()]
    for overrides in (chosen, []):
        GlobalHydra.instance().clear()
        try:
            with initialize_config_dir(str(CONF), version_base="1.3"):
                values = OmegaConf.to_container(compose(config_name, overrides), resolve=False)
        except HydraException:
            continue
        assert isinstance(values, dict)
        return flat_keys({str(key): value for key, value in values.items()}) + sorted(groups & values.keys())
    return []
