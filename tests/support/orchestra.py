"""The recipes of the documentation on the bed's hosts, carried out as by Kubernetes, Docker Compose and a shell.

Each pod runs on a host of its own. Names of services are put into the hosts' /etc/hosts, secrets into environments, and
containers that end are started again if their controller would do so. Nothing here knows hvdgloo.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.support import warm
from tests.support.hosts import Bed, HostProcess

POD_INDEX = "metadata.labels['apps.kubernetes.io/pod-index']"
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)


@dataclass(frozen=True)
class Pod:
    """One pod: its first container's command and environment.

    Attributes:
        name: ``train-2``.
        again: it is started again when it ends.
        after_failure: only if it has failed.
    """

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(repr=False)
    again: bool = False
    after_failure: bool = False


def blocks(page: Path, heading: str, language: str) -> list[str]:
    """The fenced blocks of one section of a page."""
    section = re.search(rf"^#+ {re.escape(heading)}$(.*?)(?=^#+ |\Z)", page.read_text(encoding="utf-8"), re.M | re.S)
    assert section is not None, f"{page} has no section {heading}"
    return [text for tag, text in _FENCE.findall(section[1]) if tag == language]


def kubernetes(text: str, secrets: Mapping[str, str]) -> list[Pod]:
    """The pods that these documents stand for, in the order of the documents."""
    pods = []
    for document in yaml.safe_load_all(text):
        if document["kind"] == "Service":
            continue
        spec = document["spec"]
        copies = spec.get("completions", spec.get("replicas", 1))
        indexed = spec.get("completionMode") == "Indexed"
        stateful = document["kind"] == "StatefulSet"
        assert not stateful or spec["podManagementPolicy"] == "Parallel"
        template = spec["template"]
        if "selector" in spec:
            assert spec["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
        (container,) = template["spec"]["containers"]
        for index in range(copies):
            env = {item["name"]: _value(item, secrets, index, stateful) for item in container.get("env", ())}
            if indexed:
                env["JOB_COMPLETION_INDEX"] = str(index)
            policy = template["spec"].get("restartPolicy", "Always")
            name = f"{document['metadata']['name']}-{index}"
            pods.append(
                Pod(name, tuple(container["command"]), env, policy != "Never", after_failure=policy == "OnFailure")
            )
    return pods


def services(text: str) -> dict[str, str]:
    """Service name to the pod that it leads to, through their labels."""
    documents = list(yaml.safe_load_all(text))
    labels = {
        f"{d['metadata']['name']}-0": d["spec"]["template"].get("metadata", {}).get("labels", {})
        for d in documents
        if d["kind"] != "Service"
    }
    found = {}
    for document in documents:
        if document["kind"] == "Service":
            wanted = document["spec"]["selector"]
            (found[document["metadata"]["name"]],) = [
                name for name, has in labels.items() if wanted.items() <= has.items()
            ]
    return found


def compose(text: str, variables: Mapping[str, str]) -> list[Pod]:
    """The containers of a Compose file."""

    def filled(text: str) -> str:
        return re.sub(r"\$\{(\w+)\}", lambda name: variables[name[1]], text)

    return [
        Pod(
            f"{name}-{number}",
            tuple(service["command"]),
            {key: filled(value) for key, value in service["environment"].items()},
            again="restart" in service,
            after_failure=service.get("restart") == "on-failure",
        )
        for name, service in yaml.safe_load(text)["services"].items()
        for number in range(service.get("deploy", {}).get("replicas", 1))
    ]  # fmt: skip


def _value(item: Mapping[str, Any], secrets: Mapping[str, str], index: int, stateful: bool) -> str:
    if "value" in item:
        return str(item["value"])
    source = item["valueFrom"]
    if "secretKeyRef" in source:
        return secrets[f"{source['secretKeyRef']['name']}/{source['secretKeyRef']['key']}"]
    assert stateful
    assert source["fieldRef"]["fieldPath"] == POD_INDEX
    return str(index)


class Orchestra:
    """Runs pods, one on each host, and starts again what is to be.

    Args:
        bed: at least as many hosts as pods.
        pods: in order of hosts.
        names: service name to pod name.
        cwd: the image's working directory.
    """

    def __init__(self, bed: Bed, pods: Sequence[Pod], names: Mapping[str, str], cwd: Path) -> None:
        hosts = list(bed)
        assert len(hosts) >= len(pods)
        self._hosts = {pod.name: host for pod, host in zip(pods, hosts, strict=False)}
        self.pods = {pod.name: pod for pod in pods}
        self.statuses: dict[str, list[int]] = {pod.name: [] for pod in pods}
        self.running: dict[str, HostProcess] = {}
        self._cwd = cwd
        for host in hosts:
            with host.path("/etc/hosts").open("a") as file:
                file.writelines(f"{self._hosts[pod].address} {name}\n" for name, pod in names.items())

    def start(self, name: str) -> None:
        """Start a pod's container."""
        pod = self.pods[name]
        path = f"{os.path.dirname(warm.python())}:{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
        log = (self._cwd / f"{name}.log").open("a")
        with log:
            self.running[name] = self._hosts[name].popen(
                pod.argv, env={**pod.env, "PATH": path}, cwd=self._cwd, stdout=log, stderr=log
            )

    def log(self, name: str) -> str:
        """Return a pod's output so far, in all its lives."""
        return (self._cwd / f"{name}.log").read_text()

    def look(self) -> None:
        """Collect what has ended, and start it again where its controller would."""
        for name, process in list(self.running.items()):
            status = process.poll()
            if status is not None:
                self.statuses[name].append(status)
                del self.running[name]
                pod = self.pods[name]
                if pod.again and not (pod.after_failure and status == 0):
                    self.start(name)

    def delete(self, name: str, grace: float = 30.0) -> int:
        """End a pod as its deletion does: SIGTERM, and some time. Returns its last status."""
        process = self.running.pop(name)
        process.terminate()
        status = process.wait(grace)
        self.statuses[name].append(status)
        return status
