"""Real peers on the hosts of a lab."""

import json
from typing import Any

from tests.netlab.lab import Lab, Program

HTTPS = 443


class LabPeer:
    def __init__(self, program: Program) -> None:
        self.program = program
        first = program.line()
        self.contact, self.invite, self.reach = first["contact"], first["invite"], first["reach"]

    @property
    def id(self) -> str:
        return str(self.contact[0])

    def look(self) -> list[str]:
        self.contact = self.ask("reach")["contact"]
        return list(self.contact[1])

    def tell(self, command: str, *arguments: Any) -> None:
        self.program.tell(json.dumps([command, *arguments]))

    def ask(self, command: str, *arguments: Any, timeout_s: float = 30.0) -> Any:
        self.tell(command, *arguments)
        return self.program.line(timeout_s)

    def send(self, other: "LabPeer", size: int, *, timeout_s: float = 60.0) -> Any:
        return self.ask("send", other.contact, size, timeout_s=timeout_s)


def create(lab: Lab, host: str, **options: Any) -> LabPeer:
    options = {"relay": True, "port": HTTPS, "lan": False, **options}
    return LabPeer(lab.python(host, "tests.netlab.peer", "create", "lab", json.dumps(options)))


def join(lab: Lab, invite: str, *hosts: str, **options: Any) -> list[LabPeer]:
    options_json = json.dumps({"lan": False, **options})
    programs = [lab.python(host, "tests.netlab.peer", "join", invite, options_json) for host in hosts]
    return [LabPeer(program) for program in programs]
