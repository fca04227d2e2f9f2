"""The environment variables of multiring."""

from __future__ import annotations

import pytest

from multiring import _core, config
from multiring.errors import UsageError
from multiring.settings import Settings
from tests.support import REPOSITORY


def test_the_table_sets_every_setting_and_nothing_else() -> None:
    core = {name for name, value in vars(_core.JobSettings).items() if isinstance(value, property)}
    own = Settings.__annotations__
    assert {variable.field for variable in config.VARIABLES} == core | set(own)


# By field of the settings; an empty value counts as absent.
READ: dict[str, dict[str, object]] = {
    "rank": {"1": 1, " ": None},
    "size": {"2": 2},
    "secret": {"00ff" * 8: bytes.fromhex("00ff" * 8)},
    "timeout": {" 12.5 ": 12.5, "": Settings().timeout},
    "log_level": {"DEBUG": "debug"},
    "spin_microseconds": {"0": 0.0, "": 40.0},
    "heartbeat": {"30": 30.0},
    "interfaces": {"eth0, 10.0.0.0/8": ["eth0", "10.0.0.0/8"]},
    "comm_dtype": {"BFloat16": "bfloat16"},
    "order": {"Any": "any"},
    "nccl": {"All": "all", "": "host"},
    "peer_memory": {"1": True, "0": False, "": False},
    "host_links": {"Ring": "ring", "": "switch"},
    "staging_bytes": {"4096": 4096, "64k": 65536, "256KiB": 262144, "2M": 2 << 20, "1gib": 1 << 30},
    "stall_warning": {"0": 0.0},
    "quiet": {"1": True, "0": False, "": False},
    "traceback": {"Full": "full", "": "short"},
    "as_gloo": {"1": True, "0": False, "": False},
}


@pytest.mark.parametrize("field", READ)
def test_values_are_read(field: str) -> None:
    for text, value in READ[field].items():
        assert getattr(config.load({f"MULTIRING_{field.upper()}": text}), field) == value


BAD = {
    "MULTIRING_RANK": ["-1", "one"],
    "MULTIRING_SIZE": ["0"],
    "MULTIRING_STORE": ["/tmp/x", "http://x"],
    "MULTIRING_TIMEOUT": ["0", "-3", "inf", "nan"],
    "MULTIRING_LOG_LEVEL": ["loud"],
    "MULTIRING_QUIET": ["yes", "2"],
    "MULTIRING_NCCL": ["1"],
    "MULTIRING_PEER_MEMORY": ["yes"],
    "MULTIRING_TRACEBACK": ["none"],
    "MULTIRING_SPIN_MICROSECONDS": ["1.5"],
    "MULTIRING_STAGING_BYTES": ["12", "1TB", "2g", "mib"],
    "MULTIRING_STALL_WARNING": ["-1"],
    "MULTIRING_HEARTBEAT": ["0.5", "1e9"],
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_value_is_named_with_what_is_accepted(name: str) -> None:
    accepted = next(variable.type for variable in config.VARIABLES if variable.name == name)
    for text in BAD[name]:
        with pytest.raises(UsageError) as caught:
            config.load({name: text})
        for part in (name, repr(text), accepted):
            assert part in str(caught.value)


def test_a_secret_is_never_shown() -> None:
    for text in ("xyz", "abcd"):
        with pytest.raises(UsageError) as caught:
            config.load({"MULTIRING_SECRET": text})
        assert text not in str(caught.value)
        shown = {item.variable.name: item.text for item in config.describe({"MULTIRING_SECRET": text})}
        assert text not in shown["MULTIRING_SECRET"]


def test_unknown_variables_are_found_with_what_may_be_meant() -> None:
    environ = {"MULTIRING_TIMOUT": "1", "MULTIRING_QQQQ": "1", "PATH": "/bin", "MULTIRING_RANK": "0"}
    expected = {"MULTIRING_QQQQ": "", "MULTIRING_TIMOUT": "MULTIRING_TIMEOUT"}
    assert config.unknown_variables(environ) == expected


def test_the_documented_table_is_the_one_in_the_code() -> None:
    page = (REPOSITORY / "docs" / "launching.md").read_text()
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| `MULTIRING_")]
    for row, variable in zip(rows, config.VARIABLES, strict=True):
        default = f"`{variable.default}`" if variable.default else "none"
        assert row == [f"| `{variable.name}`", default, variable.type, f"{variable.description} |"]
