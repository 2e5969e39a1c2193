"""The language of the scenario files: events, one line each, and the results of the core.

    policy NAME                      which policy (before anything else; laps-sd unless given)
    set NAME=VALUE …                 settings (before anything else)
    at SECONDS                       the clock from here on
    worker ID [slots= blocks= max_length=] [holds=a@1,b@2:host]
                                     its hello, with the requests it holds (on the device by default)
    arrive ID [prompt= max= hint= priority= class= tenant=]
    recovered ID … [on=WORKER] epoch=N emitted=N rounds=N [deaths=N death_round=N]
    report WORKER ID:TOKENS …        a round: ID:3 three tokens; ID:3! and the end; ID:3@2 under lease epoch 2;
                                     ID:3/7 from position 7; evicted=ID residency none after it; s=SECONDS its time
    cancel ID    lost WORKER [hung=1]    drain WORKER    gone ID    stale ID
    explain ID    place ID    queue    workers    depth    story ID
                                     questions; `place`: what its place depends on

Lines up to `----` are one step, except questions, which are asked after it.
"""

from __future__ import annotations

from dataclasses import replace

from laps_sd.contract.choose import Residency
from laps_sd.contract.ends import End
from scheduler_svc.core.commands import Assign, Command, Commit, Drained, Drop, Finish, Lease, Rank, Release
from scheduler_svc.core.estimates.priors import Priors
from scheduler_svc.core.events import (
    Arrived,
    EndRequested,
    Event,
    Held,
    Progress,
    Recovered,
    Refused,
    RequestFacts,
    ResidencyChange,
    RoundReported,
    WorkerDraining,
    WorkerFacts,
    WorkerLost,
    WorkerUp,
)
from scheduler_svc.core.policies import policy_named
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.settings import CoreSettings

DRAFT_LEN = 5


class Script:
    """Scenario in progress."""

    def __init__(self) -> None:
        self._policy = "laps-sd"
        self._settings: dict[str, float] = {}
        self._core: Scheduler | None = None
        self._now_s = 0.0
        self._sequence = 0
        self._emitted: dict[str, int] = {}
        self._epoch: dict[str, int] = {}

    @property
    def core(self) -> Scheduler:
        if self._core is None:
            defaults = CoreSettings()
            given = {name: type(getattr(defaults, name))(value) for name, value in self._settings.items()}
            settings = replace(defaults, **given)
            self._core = Scheduler(policy_named(self._policy, settings), settings, Priors())
        return self._core

    def block(self, lines: list[str]) -> list[str]:
        """Play the lines of one block; return what came out."""
        events: list[Event] = []
        questions: list[list[str]] = []
        for line in lines:
            words = line.split()
            plain = [word for word in words[1:] if "=" not in word]
            named = dict(word.split("=", 1) for word in words[1:] if "=" in word)
            match words[0]:
                case "policy":
                    self._policy = plain[0]
                case "set":
                    self._settings |= {name: _number(value) for name, value in named.items()}
                case "at":
                    self._now_s = float(plain[0])
                case "explain" | "place" | "queue" | "workers" | "depth" | "story":
                    questions.append(words)
                case word:
                    events.append(self._event(word, plain, named))
        out = [self._command(command) for command in self.core.step(self._now_s, events)]
        self.core.check()
        for words in questions:
            out.extend(self._answer(words))
        return [line for line in out if line] or ["nothing"]

    def _event(self, word: str, plain: list[str], named: dict[str, str]) -> Event:
        match word:
            case "worker":
                facts = WorkerFacts(
                    plain[0],
                    int(named.get("slots", 1)),
                    int(named.get("blocks", 1000)),
                    int(named.get("blocks", 1000)),
                    16,
                    int(named.get("max_length", 4096)),
                    DRAFT_LEN,
                )
                return WorkerUp(
                    facts, tuple(_held(item) for item in named.get("holds", "").split(",") if item)
                )
            case "arrive":
                self._emitted[plain[0]] = 0
                self._epoch[plain[0]] = 0
                return Arrived(self._facts(plain[0], named))
            case "recovered":
                self._emitted[plain[0]] = int(named["emitted"])
                self._epoch[plain[0]] = int(named["epoch"])
                rounds = int(named["rounds"])
                return Recovered(
                    self._facts(plain[0], named),
                    emitted=int(named["emitted"]),
                    rounds=rounds,
                    drafted=DRAFT_LEN * rounds,
                    accepted=int(named["emitted"]) - rounds,
                    attained_s=0.03 * rounds,
                    preemptions=0,
                    worker_id=named.get("on"),
                    lease_epoch=int(named["epoch"]),
                    deaths=int(named.get("deaths", 0)),
                    death_round=int(named.get("death_round", 0)),
                )
            case "report":
                return self._report(plain[0], plain[1:], named)
            case "cancel":
                return EndRequested(plain[0], End.CANCELLED, "the client asked")
            case "lost":
                return WorkerLost(plain[0], hung="hung" in named)
            case "drain":
                return WorkerDraining(plain[0])
            case "gone" | "stale":
                return Refused(plain[0])
            case _:
                raise ValueError(f"no such command: {word}")

    def _facts(self, request_id: str, named: dict[str, str]) -> RequestFacts:
        self._sequence += 1
        return RequestFacts(
            request_id=request_id,
            sequence=int(named.get("sequence", self._sequence)),
            arrival_s=self._now_s,
            tenant=named.get("tenant", "t"),
            priority=int(named.get("priority", 0)),
            workload_class=named.get("class", ""),
            prompt_tokens=int(named.get("prompt", 100)),
            max_tokens=int(named.get("max", 2000)),
            expected_output_tokens=int(named["hint"]) if "hint" in named else None,
        )

    def _report(self, worker: str, entries: list[str], named: dict[str, str]) -> RoundReported:
        progress = tuple(self._progress(entry) for entry in entries)
        seconds = float(named.get("s", 0.03))
        prefilled = sum(item.prefilled for item in progress)
        return RoundReported(
            worker,
            progress,
            tuple(
                ResidencyChange(i, self._epoch[i], Residency.NONE)
                for i in named.get("evicted", "").split(",")
                if i
            ),
            draft_s=seconds / 3,
            verify_s=seconds * 2 / 3,
            prefill_s=1e-4 * prefilled,
            swap_s=0.0,
            idle_s=0.0,
            total_s=seconds + 1e-4 * prefilled,
            free_target_blocks=900,
            free_draft_blocks=900,
        )

    def _progress(self, entry: str) -> Progress:
        ended = entry.endswith("!")
        request_id, rest = entry.rstrip("!").split(":")
        rest, _, position = rest.partition("/")
        rest, _, epoch = rest.partition("@")
        at = int(position) if position else self._emitted.get(request_id, 0)
        count = int(rest)
        self._emitted[request_id] = max(self._emitted.get(request_id, 0), at + count)
        return Progress(
            request_id=request_id,
            lease_epoch=int(epoch) if epoch else self._epoch.get(request_id, 1),
            position=at,
            tokens=tuple(range(at, at + count)),
            drafted=DRAFT_LEN,
            accepted=max(0, count - 1),
            prefilled=100 if at == 0 else 0,
            end=End.STOP if ended else None,
            cut_characters=0,
            error="",
        )

    def _command(self, command: Command) -> str:
        match command:
            case Commit():
                end = f", ends: {command.end.value}" if command.end else ""
                return f"commit {command.request_id} {len(command.tokens)} tokens at {command.position}{end}"
            case Finish(request_id, end):
                return f"finish {request_id}: {end.value}"
            case Lease(request_id, worker_id, epoch):
                self._epoch[request_id] = epoch
                return f"lease {request_id}@{epoch} to {worker_id}"
            case Release(request_id, epoch):
                return f"release {request_id}@{epoch}"
            case Rank():
                return ""
            case Assign(worker_id, entries):
                return f"assign {worker_id}: {' '.join(f'{e.request_id}@{e.lease_epoch}' for e in entries) or '-'}"
            case Drop(worker_id, requests):
                return f"drop from {worker_id}: {' '.join(f'{i}@{epoch}' for i, epoch in requests)}"
            case Drained(worker_id):
                return f"drained {worker_id}"

    def _answer(self, words: list[str]) -> list[str]:
        match words:
            case ["explain", request_id]:
                e = self.core.explain(request_id, self._now_s)
                if e is None:
                    return [f"{request_id}: unknown"]
                level = "" if e.level is None else f"level {e.level}, "
                known = {None: "", True: "perceptible, ", False: "non-perceptible, "}[e.perceptible]
                where = f"{e.state.value}{f' on {e.worker_id}' if e.worker_id else ''}"
                fits = "" if not e.waits_for else ", fits no worker"
                if e.waits_for.startswith("a worker of its own"):
                    fits = ", waits for a worker of its own"
                rank = f"{level}{known}{e.ahead.total} ahead"
                reserved = ", reserved" if e.reserved else ""
                turn = ", its tenant is ahead" if e.tenant_ahead else ""
                return [f"{request_id}: {where}, {rank}, {e.preemptions} preemptions{reserved}{turn}{fits}"]
            case ["place", request_id]:
                e = self.core.explain(request_id, self._now_s)
                assert e is not None
                return [f"{request_id}: {e.ordered_by}"]
            case ["story", request_id]:
                e = self.core.explain(request_id, self._now_s)
                assert e is not None
                return [f"{request_id}: {' '.join(line.what for line in e.story)}"]
            case ["queue"]:
                return ["queue: " + " ".join(entry.request_id for entry in self.core.queue(self._now_s, 100))]
            case ["workers"]:
                return [
                    f"{w.worker_id}: {w.running} running of {w.listed} listed"
                    f"{', draining' if w.draining else ''}{'' if w.up else ', not up'}"
                    for w in self.core.workers()
                ]
            case ["depth"]:
                return [f"depth: {self.core.depth_by_level()}"]
            case _:
                raise ValueError(f"no such question: {words}")


def _held(item: str) -> Held:
    lease, _, where = item.partition(":")
    request_id, epoch = lease.split("@")
    return Held(request_id, int(epoch), Residency[where.upper()] if where else Residency.DEVICE)


def _number(value: str) -> float:
    return float(value) if "." in value else int(value)


def play(text: str) -> str:
    """Return the scenario with its current results; comments and blank lines stay."""
    script = Script()
    out: list[str] = []
    commands: list[str] = []
    skipping = False
    for line in text.splitlines():
        stripped = line.strip()
        if skipping and stripped:
            continue
        skipping = False
        out.append(line)
        if stripped == "----":
            out.extend(script.block(commands))
            commands = []
            skipping = True
        elif stripped and not stripped.startswith("#"):
            commands.append(stripped)
    return "\n".join(out) + "\n"
