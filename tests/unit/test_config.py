"""Config: every setting is read, refused and written as its declaration says."""

from __future__ import annotations

import dataclasses
import string
from collections import Counter
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdgloo.config import (
    LOG_LEVELS,
    VARIABLES_CHECKED,
    Config,
    environment_names,
    format_endpoint,
    parse_endpoint,
    read_secret_file,
    settings,
    unknown_variables,
    without_place,
)
from hvdgloo.errors import ConfigError
from hvdgloo.runner.job.command import worker_environment
from hvdgloo.runner.job.spec import HostEntry, assign
from hvdgloo.types import WireFormat
from tests.support.launching import of_a_service

SECRET = "ab" * 16

# Field to a text of its variable and the value that it means.
GOOD: dict[str, tuple[str, Any]] = {
    "rendezvous": ("10.0.0.5:1234", "10.0.0.5:1234"),
    "secret": (SECRET, bytes.fromhex(SECRET)),
    "secret_file": ("", None),  # needs a file: tested below
    "job_id": ("abc", "abc"),
    "agent_id": ("abc.0", "abc.0"),
    "epoch": ("3", 3),
    "rank": ("0", 0),
    "index": ("7", 7),
    "elastic": ("1", True),
    "worker": ("h2:0.7", "h2:0.7"),
    "hostname": ("h2", "h2"),
    "address": ("fd00::1", "fd00::1"),
    "port_range": ("4000-4100", (4000, 4100)),
    "tls": (" Required", "required"),
    "tls_cert": ("/etc/c.pem", "/etc/c.pem"),
    "tls_key": ("k.pem", "k.pem"),
    "tls_ca": ("ca.pem", "ca.pem"),
    "as_horovod": ("yes", True),
    "as_gloo": ("yes", True),
    "connect_timeout": ("1.5", 1.5),
    "start_timeout": ("60", 60.0),
    "spark_start_timeout": ("900", 900.0),
    "operation_timeout": ("1e2", 100.0),
    "fusion_threshold": ("0", 0),
    "inline_threshold": ("64", 64),
    "cycle_time": ("0", 0.0),
    "gpu_operations": (" NCCL", "nccl"),
    "gpu_completion": ("Stream", "stream"),
    "wire": ("INT8", "int8"),
    "wire_threshold": ("1", 1),
    "hierarchical_threshold": ("65536", 65536),
    "hierarchical_distribution_threshold": ("1", 1),
    "elastic_timeout": ("20.5", 20.5),
    "elastic_join": (" NOW", "now"),
    "elastic_overlap": ("1", True),
    "cache_capacity": ("12", 12),
    "control_fanin": ("4", 4),
    "control_tree_ranks": ("9", 9),
    "thread_affinity": (" 3, 0", "3,0"),
    "cpu_operations": (" GLOO", "gloo"),
    "gloo_provider": ("PyGloo", "pygloo"),
    "shm_segment": ("65536", 65536),
    "gradient_bucket": ("0", 0),
    "deterministic": ("1", True),
    "check_weights": ("0", False),
    "disable_group_fusion": ("1", True),
    "autotune": ("1", True),
    "autotune_log": ("tuning.csv", "tuning.csv"),
    "autotune_warmup_samples": ("0", 0),
    "autotune_steps_per_sample": ("1", 1),
    "autotune_max_samples": ("5", 5),
    "autotune_noise": ("0.5", 0.5),
    "stall_check_disable": ("True", True),
    "stall_warning_time": ("0.5", 0.5),
    "stall_shutdown_time": ("90", 90.0),
    "timeline": ("trace.{rank}.json", "trace.{rank}.json"),
    "timeline_mark_cycles": ("1", True),
    "observe": ("0", False),
    "observe_interval": ("0.25", 0.25),
    "observer": ("/tmp/agent", "/tmp/agent"),
    "log_level": ("debug", "DEBUG"),
    "log_hide_time": ("on", True),
}

# Field, a text that cannot be used, and the form that the error names.
_WHOLE = "expected a whole number, at least 0"
_POSITIVE = "expected a number greater than 0, up to 1000000"
_NUMBER = "expected a number from 0, up to 1000000"
_CORES = "expected the number of a core, or one for each local rank: 0,1,2"
_FLAG = "expected 1 or 0 (true/false, yes/no, on/off)"
_PORTS = "expected FIRST-LAST with ports from 1 to 65535, the lower one first"
_ENDPOINT = "expected host:port, or [address]:port for IPv6"
BAD = [
    *(
        ("rendezvous", text, _ENDPOINT)
        for text in ("h1", "h1:", ":80", "h1:0", "h1:65536", "h1:x", "fd00::1:80", "[]:1")
    ),
    ("epoch", "-1", _WHOLE),
    ("epoch", "1.0", _WHOLE),
    ("rank", "one", _WHOLE),
    ("elastic", "perhaps", _FLAG),
    ("index", " ", _WHOLE),
    *(("tls", text, "expected one of auto, off, required") for text in ("1", "yes", "on")),
    *(("port_range", text, _PORTS) for text in ("0-5", "5-4", "70000", "4000-70000", "a-b", "-5", "1-2-3")),
    *(("connect_timeout", text, _POSITIVE) for text in ("0", "-1", "soon", "nan", "inf", "1e300")),
    ("start_timeout", "0", _POSITIVE),
    ("spark_start_timeout", "0", _POSITIVE),
    ("operation_timeout", "None", _POSITIVE),
    ("elastic_timeout", "0", _POSITIVE),
    ("elastic_join", "later", "expected one of ready, now"),
    ("elastic_overlap", "perhaps", _FLAG),
    ("fusion_threshold", "64MB", _WHOLE),
    ("inline_threshold", "65537", "expected a whole number, from 0 to 65536"),
    ("gpu_operations", "mpi", "expected one of auto, nccl, gloo"),
    ("gpu_completion", "later", "expected one of host, stream"),
    ("wire", "fp8", f"expected one of {', '.join(form.value for form in WireFormat)}"),
    ("wire_threshold", "-1", _WHOLE),
    ("hierarchical_threshold", "-1", _WHOLE),
    ("hierarchical_distribution_threshold", "0", "expected a whole number, at least 1"),
    ("cycle_time", "-0.1", _NUMBER),
    ("cycle_time", "(None,)", _NUMBER),
    ("cache_capacity", "1e3", _WHOLE),
    ("control_fanin", "2147483648", "expected a whole number, from 0 to 2147483647"),
    ("control_tree_ranks", "1", "expected a whole number, from 2 to 2147483647"),
    *(("thread_affinity", text, _CORES) for text in ("all", "0-3", "1,,2", "-1")),
    ("cpu_operations", "mpi", "expected one of auto, shm, gloo"),
    ("gloo_provider", "mpi", "expected one of auto, torch, pygloo"),
    ("shm_segment", "65535", "expected a whole number, at least 65536"),
    ("gradient_bucket", "-1", _WHOLE),
    ("deterministic", "perhaps", _FLAG),
    ("check_weights", "maybe", _FLAG),
    ("disable_group_fusion", "2", _FLAG),
    ("autotune", "perhaps", _FLAG),
    ("autotune_warmup_samples", "-1", _WHOLE),
    ("autotune_steps_per_sample", "0", "expected a whole number, at least 1"),
    ("autotune_max_samples", "0", "expected a whole number, at least 1"),
    *(("autotune_noise", text, "expected a number from 0 to 1") for text in ("1.5", "-0.1", "much")),
    ("timeline_mark_cycles", "some", _FLAG),
    ("as_horovod", "perhaps", _FLAG),
    ("as_gloo", "perhaps", _FLAG),
    ("stall_check_disable", "maybe", _FLAG),
    ("stall_warning_time", "0", _POSITIVE),
    ("stall_shutdown_time", "inf", _NUMBER),
    ("observe", "sometimes", _FLAG),
    ("observe_interval", "0", _POSITIVE),
    ("log_level", "LOUD", "expected one of " + ", ".join(LOG_LEVELS)),
    ("log_hide_time", "-", _FLAG),
]
BAD_SECRETS = [
    ("not hexadecimal: zz", "expected the job secret in hexadecimal digits"),
    ("abcd", "expected at least 32 hexadecimal digits (16 bytes)"),
]


def _field(name: str) -> dataclasses.Field[Any]:
    return next(field for field in dataclasses.fields(Config) if field.name == name)


def test_every_field_is_tried_here() -> None:
    assert set(GOOD) == set(settings()) == {field.name for field in dataclasses.fields(Config)}
    always_usable = {"job_id", "agent_id", "worker", "hostname", "address", "secret_file", "timeline", "observer"}
    always_usable |= {"tls_cert", "tls_key", "tls_ca", "autotune_log"}
    assert {name for name, _, _ in BAD} | always_usable | {"secret"} == set(settings())


@pytest.mark.parametrize("name", GOOD)
def test_a_field_is_read_from_its_variable(name: str) -> None:
    text, value = GOOD[name]
    config = Config.from_env({settings()[name].env: text})
    assert getattr(config, name) == value
    others: Any = {name: _field(name).default}
    assert dataclasses.replace(config, **others) == Config()


@pytest.mark.parametrize(
    ("name", "fallback"), [(name, fallback) for name, s in settings().items() for fallback in s.fallback]
)
def test_a_fallback_is_read_if_our_own_name_is_absent(name: str, fallback: str) -> None:
    text, value = GOOD[name]
    assert getattr(Config.from_env({fallback: text}), name) == value
    # Ours wins, and an empty variable counts as absent.
    env = settings()[name].env
    assert getattr(Config.from_env({env: text, fallback: "nonsense,:"}), name) == value
    assert getattr(Config.from_env({env: "", fallback: text}), name) == value


@pytest.mark.parametrize(
    "variable",
    [
        "HOROVOD_RANK",
        "HOROVOD_HOSTNAME",
        "HOROVOD_GLOO_TIMEOUT_SECONDS",
        "HOROVOD_FUSION_THRESHOLD",
        "HOROVOD_CYCLE_TIME",
        "HOROVOD_CACHE_CAPACITY",
        "HOROVOD_DISABLE_GROUP_FUSION",
        "HOROVOD_STALL_CHECK_DISABLE",
        "HOROVOD_STALL_CHECK_TIME_SECONDS",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
        "HOROVOD_LOG_LEVEL",
        "HOROVOD_LOG_HIDE_TIME",
    ],
)
def test_horovods_variables_keep_working(variable: str) -> None:
    assert variable in set(environment_names())


@pytest.mark.parametrize(("name", "text", "form"), BAD)
def test_an_error_names_variable_value_and_form(name: str, text: str, form: str) -> None:
    setting = settings()[name]
    for variable in (setting.env, *setting.fallback):
        with pytest.raises(ConfigError) as caught:
            Config.from_env({variable: text})
        assert str(caught.value) == f"{variable}: {text!r} cannot be used: {form}"


@pytest.mark.parametrize(("text", "form"), BAD_SECRETS)
def test_an_error_about_the_secret_does_not_show_it(text: str, form: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.from_env({"HVDGLOO_SECRET": text})
    assert str(caught.value) == f"HVDGLOO_SECRET: its value cannot be used: {form}"
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


def test_the_secret_is_never_shown(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text(SECRET + "\n")
    for environ in ({"HVDGLOO_SECRET": SECRET}, {"HVDGLOO_SECRET_FILE": str(file)}):
        config = Config.from_env(environ)
        assert config.secret == bytes.fromhex(SECRET)
        for shown in (repr(config), str(config), f"{config}"):
            assert SECRET not in shown
            assert repr(config.secret) not in shown
            assert "secret=" not in shown


def test_the_secret_comes_from_its_file(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text(f"  {SECRET}\n")
    config = Config.from_env({"HVDGLOO_SECRET_FILE": str(file)})
    assert config.secret == bytes.fromhex(SECRET) == read_secret_file(str(file))
    # What is handed on is where the secret is, not the secret.
    assert config.to_env() == {"HVDGLOO_SECRET_FILE": str(file)}
    assert Config.from_env(config.to_env()) == config


def test_a_secret_that_is_given_wins_over_its_file(tmp_path: Path) -> None:
    config = Config.from_env({"HVDGLOO_SECRET": SECRET, "HVDGLOO_SECRET_FILE": str(tmp_path / "absent")})
    assert config.secret == bytes.fromhex(SECRET)


@pytest.mark.parametrize("content", [None, "", "xyz", "ab", "ä" * 32])
def test_a_secret_file_that_cannot_be_used_is_named(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "secret"
    if content is not None:
        file.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        Config.from_env({"HVDGLOO_SECRET_FILE": str(file)})
    assert str(caught.value).startswith(f"HVDGLOO_SECRET_FILE={file}: ")
    assert not content or content not in str(caught.value).partition(str(file))[2]


def test_from_env_reads_the_process_environment_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in environment_names():
        monkeypatch.delenv(name, raising=False)
    assert Config.from_env() == Config()
    monkeypatch.setenv("HVDGLOO_CYCLE_TIME", "2.5")
    assert Config.from_env() == Config(cycle_time=2.5)


def test_defaults_write_nothing() -> None:
    assert Config().to_env() == {}


_texts = st.text(string.ascii_letters + string.digits + "-._ ", min_size=1).filter(str.strip)
_seconds = st.floats(1e-6, 1e6)
_ports = st.tuples(st.integers(1, 65535), st.integers(1, 65535)).map(lambda pair: (min(pair), max(pair)))
_endpoints = st.builds(format_endpoint, st.sampled_from(["h1", "10.0.0.5", "fd00::1", "::1"]), st.integers(1, 65535))
configs = st.builds(
    Config,
    rendezvous=st.none() | _endpoints,
    secret=st.none() | st.binary(min_size=16, max_size=64),
    job_id=st.just("") | _texts,
    agent_id=st.just("") | _texts,
    epoch=st.integers(0, 2**31),
    rank=st.none() | st.integers(0, 5000),
    index=st.none() | st.integers(0, 5000),
    elastic=st.booleans(),
    worker=st.none() | _texts,
    elastic_timeout=_seconds,
    elastic_join=st.sampled_from(["ready", "now"]),
    elastic_overlap=st.booleans(),
    hostname=st.none() | _texts,
    address=st.none() | st.sampled_from(["10.0.0.5", "fd00::1"]),
    port_range=st.none() | _ports,
    tls=st.sampled_from(["auto", "off", "required"]),
    tls_cert=st.just("") | _texts,
    as_horovod=st.booleans(),
    as_gloo=st.booleans(),
    connect_timeout=_seconds,
    start_timeout=_seconds,
    spark_start_timeout=_seconds,
    operation_timeout=_seconds,
    fusion_threshold=st.integers(0, 2**40),
    inline_threshold=st.integers(0, 65536),
    cycle_time=st.just(0.0) | _seconds,
    cache_capacity=st.integers(0, 2**31),
    control_fanin=st.integers(0, 2**31 - 1),
    control_tree_ranks=st.integers(2, 2**31 - 1),
    gpu_operations=st.sampled_from(["auto", "nccl", "gloo"]),
    gpu_completion=st.sampled_from(["host", "stream"]),
    wire=st.sampled_from([form.value for form in WireFormat]),
    wire_threshold=st.integers(0, 2**31),
    hierarchical_threshold=st.integers(0, 2**31),
    hierarchical_distribution_threshold=st.integers(1, 2**31),
    gradient_bucket=st.integers(0, 2**31),
    deterministic=st.booleans(),
    check_weights=st.booleans(),
    disable_group_fusion=st.booleans(),
    autotune=st.booleans(),
    autotune_log=st.just("") | _texts,
    autotune_warmup_samples=st.integers(0, 2**31),
    autotune_steps_per_sample=st.integers(1, 2**31),
    autotune_max_samples=st.integers(1, 2**31),
    autotune_noise=st.floats(0, 1),
    stall_check_disable=st.booleans(),
    stall_warning_time=_seconds,
    stall_shutdown_time=st.just(0.0) | _seconds,
    timeline=st.none() | _texts,
    timeline_mark_cycles=st.booleans(),
    log_level=st.sampled_from(LOG_LEVELS),
    log_hide_time=st.booleans(),
)


@hypothesis.settings(deadline=None)
@given(configs)
def test_what_is_written_is_read_back(config: Config) -> None:
    assert Config.from_env(config.to_env()) == config


@hypothesis.settings(deadline=None)
@given(configs)
def test_only_what_differs_from_the_default_is_written(config: Config) -> None:
    differs = {settings()[f.name].env for f in dataclasses.fields(Config) if getattr(config, f.name) != f.default}
    assert set(config.to_env()) == differs


@hypothesis.settings(deadline=None)
@given(st.sampled_from(sorted(settings())), st.text())
def test_any_text_is_read_or_refused_as_a_config_error(name: str, text: str) -> None:
    if name == "secret_file":
        return
    variable = settings()[name].env
    try:
        config = Config.from_env({variable: text})
    except ConfigError as error:
        refusal = str(error)
    else:
        refusal = ""
        assert Config.from_env(config.to_env()) == config
    assert refusal == "" or refusal.startswith(f"{variable}: ")


@hypothesis.settings(deadline=None)
@given(st.sampled_from(["h1", "10.0.0.5", "fd00::1", "::"]), st.integers(1, 65535))
def test_endpoints_are_read_back(host: str, port: int) -> None:
    assert parse_endpoint(format_endpoint(host, port)) == (host, port)


@pytest.mark.parametrize("attribute", ["env", "flag", "yaml"])
def test_no_two_settings_share_a_name(attribute: str) -> None:
    names = Counter(name for s in settings().values() if (name := getattr(s, attribute)) is not None)
    assert [name for name, count in names.items() if count > 1] == []


def test_no_variable_is_read_for_two_settings() -> None:
    assert [name for name, count in Counter(environment_names()).items() if count > 1] == []


@pytest.mark.parametrize("name", sorted(settings()))
def test_every_declaration_is_complete(name: str) -> None:
    setting = settings()[name]
    assert setting.env.startswith("HVDGLOO_")
    assert setting.help
    assert not setting.help.endswith(".")
    if isinstance(_field(name).default, (int, float)) and not isinstance(_field(name).default, bool):
        assert setting.unit or name == "epoch"
    if setting.scale != 1:
        assert setting.unit


def test_a_config_does_not_change() -> None:
    config = Config()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.rank = 1  # type: ignore[misc]


def test_a_launcher_gives_its_workers_places_of_their_own_and_nothing_else_is_lost() -> None:
    user_s = {"SHELL": "sh", "HVDGLOO_CYCLE_TIME": "3", "JOB_COMPLETION_INDEX": "1", "HVDGLOO_PORT_RANGE": "1-2"}
    place = {"HVDGLOO_SECRET_FILE": "/f", "HVDGLOO_RANK": "1", "HOROVOD_RANK": "1", "HVDGLOO_ADDRESS": "127.0.0.1"}
    place |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_ERROR_FILE": "/tmp/error.json"}
    assert without_place({**user_s, **place}) == user_s


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("HVDGLOO_FUSION_TRESHOLD", "did you mean HVDGLOO_FUSION_THRESHOLD?"),
        ("HVDGLOO_LOGLEVEL", "did you mean HVDGLOO_LOG_LEVEL?"),
        ("HVDGLOO_RENDEZVOUS_PORT", "did you mean"),
        ("HVDGLOO_VERBOSE", "docs/configuration.md"),
        ("HOROVOD_CYCLE_TIM", "did you mean HOROVOD_CYCLE_TIME?"),
    ],
)
def test_a_variable_that_is_no_setting_is_told(name: str, hint: str) -> None:
    (line,) = unknown_variables({name: "29400", "PATH": "/bin"})
    assert name in line
    assert hint in line


def test_variables_that_others_set_are_not_told() -> None:
    slot = assign([HostEntry("localhost", 1)], 1)[0]
    given = worker_environment(
        slot, job_id="", epoch=0, rendezvous=("h", 1), secret=b"", address="127.0.0.1", master=("h", 1)
    )
    every = dict.fromkeys(environment_names(), "1")
    assert unknown_variables({**given, **every, "HVDGLOO_TEST_FRONTENDS": "numpy"}) == []
    assert unknown_variables({"HOROVOD_CCL_BGT_AFFINITY": "1", "HOROVOD_GPU_OPERATIONS": "NCCL"}) == []


def test_variables_that_a_launcher_has_checked_are_not_told_again() -> None:
    assert unknown_variables({"HVDGLOO_LOGLEVEL": "1", VARIABLES_CHECKED: "1"}) == []


@pytest.mark.parametrize("service", ["HVDGLOO", "HVDGLOO_RENDEZVOUS", "HOROVOD", "HOROVOD_GLOO_RENDEZVOUS"])
def test_a_kubernetes_service_is_no_setting(service: str) -> None:
    brought = of_a_service(service)
    assert unknown_variables(brought) == []
    assert Config.from_env(brought) == Config.from_env({})
