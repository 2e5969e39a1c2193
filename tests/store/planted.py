"""Plants mistakes in the store, one after another, and runs its tests: each has to make one fail.

python -m tests.store.planted            # all of them, some minutes
python -m tests.store.planted fold       # those whose name or file holds the word
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
COPIED = ("laps_sd", "scheduler_svc", "tests", "protos", "gateway", "worker_svc", "pyproject.toml")
TESTS = ("test_log", "test_stateful", "test_contract", "test_faults", "test_protocol")


@dataclass(frozen=True)
class Mistake:
    """A text in a file of the store, and the text that replaces it."""

    name: str
    file: str
    right: str
    wrong: str


MISTAKES = (
    Mistake(
        "an old leader appends",
        "lua/append.lua",
        "if redis.call('GET', KEYS[1]) ~= leadership then return {'fenced'} end",
        "",
    ),
    Mistake(
        "an append after a missing entry",
        "lua/append.lua",
        "if newest ~= after then",
        "if newest == id then",
    ),
    Mistake("an append over a rival's", "lua/append.lua", "entry[2][2] == progress and ALREADY", "ALREADY"),
    Mistake("a missing entry counts as written", "lua/append.lua", "or 'behind'}", "or ALREADY}"),
    Mistake("no entry ever goes", "lua/append.lua", "'MINID', folded, id", "'MINID', 0, id"),
    Mistake(
        "an append after another entry than its own",
        "lua/append.lua",
        "#rest ~= 1 or rest[1][1] ~= after",
        "#rest == 0",
    ),
    Mistake("the log lives for ever", "lua/append.lua", "redis.call('PEXPIRE', KEYS[2], shard_ttl_ms)", ""),
    Mistake(
        "a fold over a gap",
        "lua/fold.lua",
        "if committed < position then return STALE end",
        "committed = math.max(committed, position)",
    ),
    Mistake(
        "a fold repeats what the keys hold",
        "lua/fold.lua",
        "string.sub(tokens, known * 4 + 1)",
        "tokens",
    ),
    Mistake("a fold over other tokens", "lua/fold.lua", "if known > 0 and", "if false and"),
    Mistake(
        "a fold brings tokens back",
        "lua/fold.lua",
        "math.max(committed, reached))",
        "reached)",
    ),
    Mistake(
        "a late fold sets progress back",
        "lua/fold.lua",
        "if tonumber(ARGV[a + 4]) >= tonumber(was[3]) then",
        "if true then",
    ),
    Mistake("a fold of an ended request", "lua/fold.lua", "or was[1] == 'ended'", ""),
    Mistake("an end loses its last tokens", "lua/finish.lua", "if committed < reached then", "if false then"),
    Mistake(
        "an end repeats tokens",
        "lua/finish.lua",
        "string.sub(ARGV[a + 14], (committed - position) * 4 + 1)",
        "ARGV[a + 14]",
    ),
    Mistake(
        "an end over a gap",
        "lua/finish.lua",
        "elseif was[1] and tonumber(was[3]) < position then",
        "elseif false then",
    ),
    Mistake(
        "a lease leaves the model pair",
        "lua/lease.lua",
        "            'pair', pair)",
        "            'state', 'leased')",
    ),
    Mistake(
        "a lease names another than its model pair", "lua/lease.lua", "'pair', pair)", "'pair', ARGV[3])"
    ),
    Mistake("a write-back leaves the model pair", "codec.py", '*("pair", request.pair)', '*("pair", "")'),
    Mistake("the log outlives a write-back", "lua/reclaimed.lua", "if ARGV[3] == '1' then", "if false then"),
    Mistake("the log of others goes", "lua/reclaimed.lua", "if ARGV[3] == '1' then", "if true then"),
    Mistake("the old layout is refused", "lua/acquire.lua", " and found ~= '1' then", " then"),
    Mistake("the old layout's keys stay", "lua/acquire.lua", "if found == '1' then", "if false then"),
    Mistake(
        "an end before its tail",
        "batch.py",
        "                    position, tokens = tail.position, [*tail.tokens, *tokens]\n",
        "                    pass\n",
    ),
    Mistake(
        "an end whose tail is folded in the same batch",
        "batch.py",
        "None if commit.request_id in progressed else",
        "",
    ),
    Mistake(
        "an end after other tokens than those of its tail",
        "batch.py",
        "if tail is not None and tail.position + len(tail.tokens) == commit.position:",
        "if tail is not None:",
    ),
    Mistake(
        "an end forgets when the first token came",
        "batch.py",
        "first_ms if tail.first_ms is None else tail.first_ms",
        "first_ms",
    ),
    Mistake(
        "an end repeats what was folded",
        "lua/commit.lua",
        "known > 0 and string.sub(tokens, known * 4 + 1) or tokens",
        "tokens",
    ),
    Mistake(
        "an end over other tokens",
        "lua/commit.lua",
        "redis.call('GETRANGE', tokens_key, position * 4, committed * 4 - 1) == string.sub(tokens, 1, known * 4)",
        "true",
    ),
    Mistake(
        "an end after a gap", "lua/commit.lua", "local follows = known == 0", "local follows = known <= 0"
    ),
    Mistake(
        "an end over more than was reported",
        "lua/commit.lua",
        "known <= tonumber(ARGV[a + 17])",
        "known <= tonumber(count)",
    ),
    Mistake(
        "an end under any lease",
        "lua/commit.lua",
        "if record_epoch ~= lease_epoch or not follows",
        "if not follows",
    ),
    Mistake(
        "a refused end takes the ends after it along",
        "lua/commit.lua",
        "    answers[#answers + 1] = commit(k, a)\n",
        "    answers[#answers + 1] = (answers[#answers] or OK) > ALREADY and STALE or commit(k, a)\n",
    ),
    Mistake(
        "the ends of a call are torn",
        "lua/commit.lua",
        "    answers[#answers + 1] = commit(k, a)\n",
        "    answers[#answers + 1] = #answers < 1 and commit(k, a) or OK\n",
    ),
    Mistake(
        "an end leaves its request in the queue",
        "lua/_common.lua",
        "    leave_queue(id, tenant, prompt_tokens)\n",
        "",
    ),
    Mistake(
        "arrivals of a call do not see each other",
        "lua/submit.lua",
        "    requests, of_tenant[tenant] = requests + 1, of_tenant[tenant] + 1\n    queued, added = queued + prompt_tokens, added",
        "    added = added",
    ),
    Mistake(
        "only the first arrival of a call joins the queue",
        "lua/submit.lua",
        "unpack(joined))",
        "joined[1], joined[2])",
    ),
    Mistake(
        "a call counts once for each tenant",
        "lua/submit.lua",
        "(added_of[tenant] or 0) + 1",
        "1",
    ),
    Mistake(
        "a call counts the prompt of its last arrival",
        "lua/submit.lua",
        "added + prompt_tokens",
        "prompt_tokens",
    ),
    Mistake(
        "an idempotency key twice in a call",
        "lua/submit.lua",
        "local entry = idempotency ~= request and",
        "local entry = #joined == 0 and idempotency ~= request and",
    ),
    Mistake(
        "an arrival that is repeated is another one",
        "lua/submit.lua",
        "if known[1] then",
        "if false then",
    ),
    Mistake(
        "a refused arrival stops those after it",
        "lua/submit.lua",
        "    answers[#answers + 1] = submit(k, a)\n",
        "    local refused = answers[#answers] and answers[#answers][3] == 0\n"
        "    answers[#answers + 1] = refused and {'queue_full', ARGV[a], 0} or submit(k, a)\n",
    ),
    Mistake(
        "an old leader submits",
        "lua/submit.lua",
        "if redis.call('GET', KEYS[1]) ~= leadership then return {'fenced'} end",
        "",
    ),
    Mistake(
        "a restore before its tail",
        "batch.py",
        "        self._fold(request.request_id for request in work.entries)\n",
        "",
    ),
    Mistake(
        "a finish without its tail",
        "batch.py",
        "(tail.position, tail.tokens) if tail is not None",
        "(0, []) if True",
    ),
    Mistake(
        "entries go before they are folded",
        "tails.py",
        ".entry if self.unfolded else number",
        ".entry + 1 if self.unfolded else number",
    ),
    Mistake(
        "a new leader has rows in the order of arrival",
        "tails.py",
        "dict(sorted(self.unfolded.items(), key=lambda item: item[1].entry))",
        "self.unfolded",
    ),
    Mistake("any lease may commit", "tails.py", " and planned.lease_epoch == commit.lease_epoch", ""),
    Mistake(
        "a row behind a gap",
        "tails.py",
        "return commit.position == planned.committed",
        "return True",
    ),
    Mistake(
        "progress of a plan before the answer",
        "tails.py",
        "            tail.tokens.extend(planned.tokens)\n",
        "",
    ),
    Mistake(
        "progress that continues a request is not kept for its fold",
        "tails.py",
        "                tail.tokens.fromlist(list(commit.tokens))  # `extend` takes twice as long for a few of them\n",
        "",
    ),
    Mistake(
        "what else happens to a request forgets its progress in the batch",
        "tails.py",
        "                    self._add(planned, commit)\n        return planned\n",
        "                    pass\n        return planned\n",
    ),
    Mistake("a refused fold counts", "batch.py", "plan.unexpected(place)", "pass"),
    Mistake("an answer counts twice", "batch.py", "if not encoded.answered:\n", "if True:\n"),
    Mistake(
        "a batch from before a write-back",
        "store.py",
        "        self.generation += 1\n",
        "",
    ),
    Mistake(
        "the end of the old log after a write-back",
        "tails.py",
        'self.newest, self.has_entries, self.ahead = "", False, False\n\n\nclass Plan',
        "self.has_entries, self.ahead = False, False\n\n\nclass Plan",
    ),
    Mistake(
        "a reader that trusts its copy after a loss",
        "store.py",
        "            self.tails.ahead = True\n",
        "            pass\n",
    ),
    Mistake(
        "the log is not read",
        "reading.py",
        "        return read_log(await self.log_entries(), await self._newest_entry())",
        '        return Log("", {})',
    ),
    Mistake(
        "a reader that does not know the newest entry", "reading.py", "await self._newest_entry())", '"")'
    ),
    Mistake(
        "an old leader clears the log",
        "lua/clear.lua",
        "if redis.call('GET', KEYS[1]) ~= ARGV[1] then return {'fenced'} end",
        "",
    ),
    Mistake("a log is cleared that is needed", "batch.py", " and not tails.unfolded:", ":"),
    Mistake("rows contradict what is known", "log.py", "or row.tokens[: len(known)] != known", ""),
    Mistake("rows behind a gap are read", "log.py", "row.position > len(tokens) or ", ""),
    Mistake("rows are read twice", "log.py", "tokens += row.tokens[len(known) :]", "tokens += row.tokens"),
    Mistake("progress of the log is not read", "log.py", "standing = row.standing\n", "pass\n"),
)


def is_found(mistake: Mistake, folder: Path) -> str | None:
    """Return the test that fails with the mistake; None if all pass."""
    path = folder / "scheduler_svc" / "store" / mistake.file
    source = path.read_text(encoding="utf-8")
    if source.count(mistake.right) != 1:
        raise SystemExit(
            f"{mistake.name}: {mistake.file} holds {mistake.right!r} {source.count(mistake.right)} times"
        )
    path.write_text(source.replace(mistake.right, mistake.wrong), encoding="utf-8")
    try:
        tests = [f"tests/store/{name}.py" for name in TESTS]
        ran = subprocess.run(
            [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:xdist", "-k", "not redis", *tests],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        path.write_text(source, encoding="utf-8")
    failed = [line for line in ran.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if ran.returncode not in (0, 1):
        raise SystemExit(
            f"{mistake.name}: pytest ended with {ran.returncode}: {(ran.stdout + ran.stderr)[-500:]}"
        )
    return failed[0].split(" - ")[0] if failed else None


def main() -> int:
    """Run all mistakes that the arguments name, and return the number that no test found."""
    chosen = [
        one
        for one in MISTAKES
        if not sys.argv[1:] or any(word in one.name + one.file for word in sys.argv[1:])
    ]
    missed = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in COPIED:
            source = ROOT / part
            if source.is_dir():
                shutil.copytree(source, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, folder / part)
        for at, mistake in enumerate(chosen, 1):
            found = is_found(mistake, folder)
            missed += found is None
            print(f"{at}/{len(chosen)}  {mistake.name}: {found or 'NOT FOUND'}", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} mistakes found")
    return missed


if __name__ == "__main__":
    sys.exit(main())
