"""The environment variables of multiring."""

from __future__ import annotations

import dataclasses

import pytest

from multiring import _core, config
from multiring.errors import UsageError
from multiring.reductions import native_comm_dtype
from tests.support import REPOSITORY


def test_an_empty_environment_gives_the_defaults() -> None:
    assert config.load({}) == config.Settings()


def test_the_table_sets_every_setting_and_nothing_else() -> None:
    fields = [field.name for field in dataclasses.fields(config.Settings)]
    assert [variable.field for variable in config.VARIABLES] == fields


def test_the_core_has_the_same_defaults() -> None:
    core, settings = _core.WorldOptions(), config.Settings()
    for name in ("timeout", "stall_warning", "staging_bytes"):
        assert getattr(core, name) == getattr(settings, name), name
    assert core.comm_dtype == native_comm_dtype(settings.comm_dtype)


def test_values_are_read() -> None:
    settings = config.load(
        {
            "MULTIRING_RANK": "1",
            "MULTIRING_SIZE": "2",
            "MULTIRING_STORE": "tcp://10.0.0.1:29500",
            "MULTIRING_SECRET": "00ff" * 8,
            "MULTIRING_TIMEOUT": " 12.5 ",
            "MULTIRING_LOG_LEVEL": "DEBUG",
            "MULTIRING_SPIN_MICROSECONDS": "0",
            "MULTIRING_STAGING_BYTES": "4 MiB",
            "MULTIRING_STALL_WARNING": "0",
        }
    )
    assert (settings.rank, settings.size) == (1, 2)
    assert settings.secret == bytes.fromhex("00ff" * 8)
    assert settings.timeout == 12.5
    assert settings.log_level == "debug"
    assert settings.spin_microseconds == 0
    assert settings.staging_bytes == 4 << 20
    assert settings.stall_warning == 0.0


def test_an_empty_value_counts_as_absent() -> None:
    assert config.load({"MULTIRING_TIMEOUT": "", "MULTIRING_RANK": " "}) == config.Settings()


def test_sizes_understand_binary_units() -> None:
    sizes = {"4096": 4096, "64k": 65536, "256KiB": 262144, "2M": 2 << 20, "1gib": 1 << 30}
    for text, size in sizes.items():
        assert config.load({"MULTIRING_STAGING_BYTES": text}).staging_bytes == size


BAD = {
    "MULTIRING_RANK": ["-1", "one"],
    "MULTIRING_SIZE": ["0"],
    "MULTIRING_STORE": ["/tmp/x", "http://x"],
    "MULTIRING_TIMEOUT": ["0", "-3", "inf", "nan"],
    "MULTIRING_LOG_LEVEL": ["loud"],
    "MULTIRING_SPIN_MICROSECONDS": ["1.5"],
    "MULTIRING_STAGING_BYTES": ["12", "1TB", "mib"],
    "MULTIRING_STALL_WARNING": ["-1"],
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


def test_describe_names_the_source() -> None:
    found = {item.variable.name: item for item in config.describe({"MULTIRING_TIMEOUT": "7"})}
    assert (found["MULTIRING_TIMEOUT"].text, found["MULTIRING_TIMEOUT"].source) == ("7", "environment")
    assert (found["MULTIRING_LOG_LEVEL"].text, found["MULTIRING_LOG_LEVEL"].source) == ("warning", "default")


def test_unknown_variables_are_found_with_what_may_be_meant() -> None:
    environ = {"MULTIRING_TIMOUT": "1", "MULTIRING_QQQQ": "1", "PATH": "/bin", "MULTIRING_RANK": "0"}
    assert config.unknown_variables(environ) == {
        "MULTIRING_QQQQ": "",
        "MULTIRING_TIMOUT": "MULTIRING_TIMEOUT",
    }


def test_the_documented_table_is_the_one_in_the_code() -> None:
    page = (REPOSITORY / "docs" / "launching.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| `MULTIRING_")]
    wanted = [
        f"| `{variable.name}` | {f'`{variable.default}`' if variable.default else 'none'} | {variable.type} "
        f"| {variable.description} |"
        for variable in config.VARIABLES
    ]
    assert rows == wanted
