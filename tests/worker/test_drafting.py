"""Draft lengths: as long as proposals pay, no longer, and not at all where they do not."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import pytest

from worker_svc.engine.draft_lengths.acceptance import PRIOR_STRENGTH, Acceptance
from worker_svc.engine.draft_lengths.chooser import (
    EXPLORED_SHARE,
    HOLD_ROUNDS,
    MARGIN,
    DraftLengths,
)
from worker_svc.engine.draft_lengths.cost_table import CostTable
from worker_svc.engine.draft_lengths.goodput import FIRST_STEP_ROWS
from worker_svc.engine.draft_lengths.outlook import RECENT, Outlook, OutputLengths


def lengths_for(*, plain: CostTable, step: CostTable, **more: int | None) -> DraftLengths:
    return DraftLengths(8, plain=plain, step=step, **more)  # type: ignore[arg-type]


MEMORY_BOUND = {"plain": CostTable([1, 1000], [1.0, 1.1]), "step": CostTable([1, 1000], [0.05, 0.05])}
COMPUTE_BOUND = {
    "plain": CostTable([1, 1001], [0.001, 1.001]),
    "step": CostTable([1, 1001], [0.0005, 0.5005]),
}
COSTLY_ROWS = {"plain": CostTable([1, 1000], [1.0, 2.0]), "step": CostTable([1, 1000], [0.05, 5.0])}


def experienced(accepted: int, tested: int) -> Acceptance:
    acceptance = Acceptance()
    for i in range(tested):
        acceptance.observe(int(i < accepted), 1)
    return acceptance


def test_cheap_rows_and_good_acceptance_draft_long() -> None:
    assert min(lengths_for(**MEMORY_BOUND).lengths([experienced(95, 100)] * 2, [8, 8])) >= 6


def test_rows_that_cost_as_much_as_tokens_do_not_draft() -> None:
    """Each row costs what a plain token costs, and the draft half as much on top: a proposal never pays."""
    assert lengths_for(**COMPUTE_BOUND).lengths([experienced(70, 100)] * 16, [8] * 16) == [0] * 16


def test_a_request_that_accepts_more_drafts_more() -> None:
    good, bad = experienced(190, 200), experienced(20, 200)
    costs = {"plain": CostTable([1, 101], [0.5, 3.0]), "step": CostTable([1, 101], [0.05, 0.5])}
    long, short = lengths_for(**costs).lengths([good, bad], [8, 8])
    assert long > short


def test_caps_hold() -> None:
    assert lengths_for(**MEMORY_BOUND).lengths([experienced(9, 10)] * 3, [0, 2, 100])[:2] == [0, 2]
    assert max(lengths_for(**MEMORY_BOUND).lengths([experienced(99, 100)], [100])) <= 8


def by_asking_each(
    chooser: DraftLengths, requests: list[Acceptance], caps: list[int], other_rows: int, keys: int
) -> list[int]:
    """Return lengths by the module's rule, request by request and depth by depth."""
    rates, count, costs = [chooser.rate(request) for request in requests], len(requests), chooser.drafted

    def round_s(proposals: int) -> float:
        """Return the extra time over the round without proposals, plus the time of our own rows alone; the
        other rows run in any case.
        """
        return (
            costs(count + proposals + other_rows, keys) - costs(count + other_rows, keys) + costs(count, keys)
        )

    def step(going: int, each: int = 1) -> float:
        return chooser.step(going * each, keys * going / count)

    another_s = (step(count) - step(1)) / (count - 1) if count > 1 else 0.0
    plain_s = chooser.plain(count, keys)
    best, lengths = (1 + MARGIN) * count / plain_s, [0] * count
    for depth in range(1, max(caps) + 1):
        price = best
        row_s = (round_s(count * depth) - round_s(0)) / (count * depth)
        tried = [
            sum(rate**k > price * (row_s + another_s) for k in range(1, min(cap, depth) + 1))
            for rate, cap in zip(rates, caps, strict=True)
        ]
        seconds = round_s(sum(tried))
        for k in range(1, depth + 1):
            going = sum(n >= k for n in tried)
            seconds += step(going, FIRST_STEP_ROWS if k == 1 else 1) if going else 0.0
        tokens = sum(rate**k for rate, n in zip(rates, tried, strict=True) for k in range(n + 1))
        if tokens / seconds > best:
            best, lengths = tokens / seconds, tried
    return lengths


@pytest.mark.parametrize("seed", range(40))
def test_the_lengths_are_those_of_the_rule(seed: int) -> None:
    rng = random.Random(seed)
    count = rng.choice((1, 2, 7, 40))
    requests = [experienced(rng.randrange(21), 20) for _ in range(count)]
    caps = [rng.randrange(1, 9) for _ in requests]
    chooser = lengths_for(
        plain=CostTable([1, 8, 400], sorted(rng.uniform(1, 4) for _ in range(3))),
        step=CostTable([1, 50], sorted(rng.uniform(0.02, 1) for _ in range(2))),
    )
    chooser.plain.key_s, chooser.step.key_s = rng.choice(((0.0, 0.0), (0.002, 0.0003)))
    chooser.set_plain(chooser.plain)
    chooser.drafted.drift(rng.choice((0.0, 10.0)))
    other_rows, keys = rng.choice((0, 30)), rng.choice((0, 100 * count))
    expected = by_asking_each(chooser, requests, caps, other_rows, keys)
    assert chooser.lengths(requests, caps, other_rows, keys=keys) == expected


def test_what_rides_along_makes_no_proposal_cheap() -> None:
    """It takes a hundred times as long as the round, and has to be done in any case."""
    costs = {"plain": CostTable([1, 1001], [0.5, 20.5]), "step": CostTable([1, 101], [0.02, 0.5])}
    requests, caps = [experienced(60, 100)] * 4, [8] * 4
    alone = lengths_for(**costs).lengths(requests, caps)
    assert 0 < max(alone) < 8
    assert lengths_for(**costs).lengths(requests, caps, other_rows=900) == alone


def test_a_choice_holds_for_some_rounds_and_no_silent_request_begins_meanwhile() -> None:
    """A choice takes as long as many rows, and its inputs change more slowly."""
    chooser = lengths_for(**MEMORY_BOUND)
    requests, caps = [experienced(90, 100) for _ in range(4)], [8] * 4
    first = chooser.lengths(requests, caps)
    assert min(first) > 0
    requests[0].observe(0, 0)  # drafted nothing, for some reason of its own
    costly = CostTable([1, 1000], [1.0, 1000.0])
    chooser.set_plain(costly)  # from now on a row costs what a token is worth
    held = [chooser.lengths(requests, caps) for _ in range(HOLD_ROUNDS - 1)]
    assert held == [[0, *first[1:]]] * (HOLD_ROUNDS - 1)
    assert chooser.lengths(requests, caps) != held[0]


def test_a_new_request_drafts_by_the_last_choice_if_it_pays_for_what_its_draft_must_read() -> None:
    chooser = lengths_for(**COSTLY_ROWS)
    requests, caps = [experienced(90, 100) for _ in range(8)], [8] * 8
    chosen = chooser.lengths(requests, caps)
    assert min(chosen) > 0
    chooser.set_plain(COMPUTE_BOUND["plain"])  # from now on a row costs what a token is worth
    late, early = Acceptance(), Acceptance()
    outlooks = [Outlook()] * 8
    with_late = chooser.lengths([*requests, late], [*caps, 8], 0, [*outlooks, Outlook(10, 1000)].__getitem__)
    assert with_late == [*chosen, 0]
    *others, its = chooser.lengths([*requests, early], [*caps, 8], 0, [*outlooks, Outlook(10)].__getitem__)
    assert others == chosen and 0 < its <= max(chosen)


@pytest.mark.parametrize("change", ["replaced", "left"])
def test_a_choice_ages_as_fast_as_its_requests_change(change: str) -> None:
    def rounds_held(changed: int) -> int:
        """Return the rounds until the new costs are noticed if `changed` of eight requests change at once."""
        requests, caps = [experienced(70, 100) for _ in range(8)], [8] * 8
        chooser = lengths_for(**COMPUTE_BOUND)
        assert not any(chooser.lengths(requests, caps))
        chooser.set_plain(MEMORY_BOUND["plain"])
        others = [experienced(70, 100) for _ in range(changed if change == "replaced" else 0)]
        now = [*requests[changed:], *others]
        held = 1
        while not any(chooser.lengths(now, caps[: len(now)])):
            held += 1
        return held

    assert rounds_held(0) == HOLD_ROUNDS
    assert rounds_held(4) == HOLD_ROUNDS // 2
    assert rounds_held(7 if change == "left" else 8) <= 2


def test_drafting_stops_as_the_batch_grows_and_begins_again_as_it_shrinks() -> None:
    """Rows are nearly free up to 16 and then cost what a token is worth; the hysteresis holds either side for
    a while."""
    chooser = lengths_for(
        plain=CostTable([1, 16, 1000], [1.0, 1.1, 80.0]), step=CostTable([1, 100], [0.02, 0.4])
    )
    request = experienced(60, 100)
    sizes = [*range(1, 65), *range(63, 0, -1)]
    longest = [max(chooser.lengths([request] * size, [8] * size)) for size in sizes]
    rising, falling = longest[:64], longest[63:][::-1]
    assert rising[0] > 1 < falling[0]
    assert rising[63] == falling[63] == 0
    assert rising == sorted(rising, reverse=True)
    assert falling == sorted(falling, reverse=True)
    assert falling.index(0) <= rising.index(0), "what drafts goes on drafting, what does not begins later"


def test_what_a_round_costs_besides_argues_for_longer_drafts() -> None:
    costs = {"plain": CostTable([1, 101], [0.5, 3.0]), "step": CostTable([1, 101], [0.1, 0.5])}
    short, long = lengths_for(**costs), lengths_for(**costs)
    long.set_plain(CostTable([1, 101], [1.5, 4.0]))
    request = experienced(80, 100)
    assert long.lengths([request], [8]) > short.lengths([request], [8])


def test_a_fixed_length_is_fixed() -> None:
    assert lengths_for(**COMPUTE_BOUND, fixed=3).lengths([Acceptance()] * 3, [8, 2, 0]) == [3, 2, 0]


def test_nobody_to_draft_for() -> None:
    assert lengths_for(**MEMORY_BOUND).lengths([], []) == []


def silent(rounds: int = 64) -> Acceptance:
    found = experienced(1, 200)
    for _ in range(rounds):
        found.observe(0, 0)
    found.met = True
    return found


def one_round(chooser: DraftLengths, requests: list[Acceptance]) -> list[int]:
    """Return lengths for these requests, after a round of theirs that accepts the expected number."""
    lengths = chooser.lengths(requests, [8] * len(requests))
    rows, steps = (
        len(requests) + sum(lengths),
        [sum(length > j for length in lengths) for j in range(max(lengths))],
    )
    costs = chooser.drafted if steps else chooser.plain
    draft_s = sum(chooser.step(going) for going in steps)
    chooser.observe_costs(rows, costs(rows), steps, draft_s, read=steps[0] if steps else 0)
    return lengths


def rounds_until_the_next_probe(chooser: DraftLengths, requests: list[Acceptance]) -> tuple[int, list[int]]:
    """Return how many rounds have no draft token, and the first that has one."""
    waited = 0
    while not any(lengths := one_round(chooser, requests)):
        waited += 1
        for request in requests:
            chooser.observe_acceptance(request, 0, 0)
    return waited, lengths


def test_silent_requests_are_probed_one_after_the_other_each_until_a_token_is_rejected() -> None:
    chooser = lengths_for(**COMPUTE_BOUND)
    first, second, other = silent(66), silent(65), silent(1)
    requests = [second, first, other]

    assert one_round(chooser, requests) == [0, 1, 0]
    assert one_round(chooser, requests) == [0, 1, 0], "its draft may still be reading"
    chooser.observe_acceptance(first, 0, 1)
    waited, lengths = rounds_until_the_next_probe(chooser, requests)
    assert lengths == [1, 0, 0]
    plain_s = chooser.plain(3)
    probe_s = 2 * (chooser.drafted(4) + chooser.step(1) - plain_s)
    assert EXPLORED_SHARE * plain_s * waited >= 0.9 * probe_s, "probes take at most a small share of the time"
    assert EXPLORED_SHARE * plain_s * (waited - HOLD_ROUNDS) <= 1.1 * probe_s, "and are not forgotten"


def test_an_accident_in_a_probe_does_not_put_the_next_one_off() -> None:
    """A thread that has no core while a probe drafts: the round takes a thousand times as long."""

    def rounds_after(times: float) -> int:
        chooser = lengths_for(**{name: costs.copy() for name, costs in COMPUTE_BOUND.items()})
        requests = [silent(66), silent(65)]
        assert chooser.lengths(requests, [8] * 2) == [1, 0]
        chooser.observe_costs(3, chooser.drafted(3), [1], times * chooser.step(1), read=1)
        chooser.observe_acceptance(requests[0], 0, 1)
        return rounds_until_the_next_probe(chooser, requests)[0]

    usual = rounds_after(1.0)
    assert usual < rounds_after(1000.0) <= 2 * usual


def test_of_equally_silent_requests_the_one_with_the_least_to_read_is_probed() -> None:
    chooser = lengths_for(**COMPUTE_BOUND)
    requests, outlooks = [silent() for _ in range(3)], [Outlook(10, 20), Outlook(20, 20), Outlook(10, 30)]
    assert chooser.lengths(requests, [8] * 3, 0, outlooks.__getitem__) == [0, 1, 0]


def test_a_probe_ends_when_the_evidence_weighs_as_much_as_the_prior() -> None:
    chooser = lengths_for(**COMPUTE_BOUND)
    request = silent()
    while chooser.lengths([request], [8]) == [0]:
        pass
    tokens = 0
    while request.probed:
        chooser.observe_acceptance(request, 1, 1)
        tokens += 1
    assert tokens == PRIOR_STRENGTH


def test_new_requests_show_that_the_traffic_has_changed() -> None:
    chooser = lengths_for(plain=CostTable([1, 1000], [1.0, 1.5]), step=CostTable([1, 1000], [0.2, 0.6]))
    while chooser.prior.rate > 0.1:
        chooser.prior.observe(0, 1)
    requests = [Acceptance() for _ in range(16)]
    caps = [8] * len(requests)
    assert sum(chooser.lengths(requests, caps)) == 1
    drafting = [1]
    while min(lengths := chooser.lengths(requests, caps)) == 0:
        drafting.append(sum(length > 0 for length in lengths))
        assert len(drafting) <= 16, "all draft tokens were accepted, and others do not draft yet"
        for request, length in zip(requests, lengths, strict=True):
            chooser.observe_acceptance(request, length, length)
    assert len(drafting) > 2
    assert all(later >= 2 * earlier for earlier, later in pairwise(drafting)), "twice as many each time"


def test_while_none_drafts_a_new_request_is_probed_as_soon_as_it_is_due() -> None:
    """The age of a choice without drafts does not matter."""
    chooser = lengths_for(**COMPUTE_BOUND)
    requests = [silent() for _ in range(8)]
    _, lengths = rounds_until_the_next_probe(chooser, requests)
    for request, length in zip(requests, lengths, strict=True):
        chooser.observe_acceptance(request, 0, length)
    one_round(chooser, requests)
    chooser._until_explored, chooser._rounds_left = 3.0, float(HOLD_ROUNDS)
    requests[0] = Acceptance()
    drafted = [one_round(chooser, requests)[0] for _ in range(3)]
    assert drafted == [0, 0, 1]


def test_after_a_probe_that_paid_the_next_new_request_is_probed_at_once() -> None:
    def probes(accepted: int) -> int:
        """Probe new requests, one at a time, each for ten rounds; return how many were probed."""
        chooser = lengths_for(plain=CostTable([1, 1000], [1.0, 1.5]), step=CostTable([1, 1000], [0.2, 0.6]))
        while chooser.prior.rate > 0.1:
            chooser.prior.observe(0, 1)
        found = 0
        for _ in range(5):
            request, drafted = Acceptance(), False
            for _ in range(10):
                (length,) = one_round(chooser, [request])
                drafted = drafted or length > 0
                chooser.observe_acceptance(request, accepted, length)
            found += drafted
        return found

    assert probes(accepted=0) <= 2
    assert probes(accepted=1) == 5


def test_a_draft_that_must_read_more_than_it_can_earn_does_not_begin() -> None:
    def asked(first: Outlook) -> list[int]:
        requests = [experienced(60, 100) for _ in range(4)]
        ahead = [first, *[Outlook(100)] * 3]
        return lengths_for(**COSTLY_ROWS).lengths(requests, [8] * 4, 0, ahead.__getitem__)

    little, much = asked(Outlook(100, lacks=10)), asked(Outlook(100, lacks=10_000))
    assert min(little) > 0
    assert much[0] == 0 and min(much[1:]) > 0


def test_rounds_without_drafts_stay_known_for_a_small_share_of_the_goodput() -> None:
    rounds = 2000

    def plain_rounds(rate: int, **costs: CostTable) -> tuple[int, float]:
        """Return the rounds without drafts, and the share of the goodput that such a round loses."""
        chooser, request = lengths_for(**costs), experienced(rate, 100)
        plain = sum(one_round(chooser, [request]) == [0] for _ in range(rounds))
        return plain, 1 - 1 / chooser._gain

    for plain, loss in (
        plain_rounds(80, plain=CostTable([1, 1000], [1.0, 1.1]), step=CostTable([1, 1000], [0.4, 0.4])),
        plain_rounds(95, **MEMORY_BOUND),
    ):
        assert 0.5 * EXPLORED_SHARE * rounds <= plain * loss <= 1.1 * EXPLORED_SHARE * rounds + loss


def test_the_expected_remaining_output_is_that_of_recent_requests_that_were_as_long() -> None:
    lengths = OutputLengths()
    assert lengths.to_come(0) == lengths.to_come(100) == math.inf, "unknown before one has ended"
    for tokens in (10, 10, 10, 40):
        lengths.observe(tokens)
    assert lengths.to_come(0) == 17.5
    assert lengths.to_come(9) == pytest.approx((1 + 1 + 1 + 31) / 4)
    assert lengths.to_come(10) == 30
    assert lengths.to_come(50) == 50, "longer than any: as much again"
    for _ in range(RECENT):
        lengths.observe(5)
    assert (lengths.to_come(0), lengths.to_come(10)) == (5, 10), "old lengths are forgotten"


def test_small_differences_change_nothing() -> None:
    """The length of the last round stays while another promises less than the hysteresis."""
    chooser = lengths_for(**MEMORY_BOUND)
    request = experienced(80, 100)
    before = chooser.lengths([request], [8])
    for accepted in (1, 1, 1, 0):
        request.observe(accepted, 1)
        assert chooser.lengths([request], [8]) == before


def test_a_request_without_evidence_is_taken_for_the_others_mean() -> None:
    chooser = lengths_for(**MEMORY_BOUND)
    for _ in range(400):
        chooser.observe_acceptance(Acceptance(), 1, 5)
    assert chooser.rate(Acceptance()) == pytest.approx(0.2, abs=0.02)
    assert chooser.rate(experienced(100, 100)) > 0.7


def test_costs_follow_the_measurements_and_not_one_accident() -> None:
    table = CostTable([1, 11], [1.0, 2.0])
    assert table(6) == pytest.approx(1.5)
    assert table(21) == pytest.approx(3.0)
    table.observe(6, 1500.0)
    assert table(6) < 1.7
    assert table(11) > 2.0, "the rest of the table moves along a little"
    for _ in range(200):
        table.observe(6, 3.0)
    assert table(6) == pytest.approx(3.0, rel=0.01)


def test_rounds_with_and_without_a_draft_are_told_apart() -> None:
    """A verification after a draft finds the caches full of the draft: here it takes twice as long."""
    chooser = lengths_for(plain=CostTable([1, 11], [1.0, 2.0]), step=CostTable([1, 11], [0.1, 0.2]))
    for _ in range(200):
        chooser.observe_costs(6, 1.5, [], 0.0)
        chooser.observe_costs(6, 3.0, [3], 0.13, read=6)
    assert chooser.plain(6) == pytest.approx(1.5, rel=0.05)
    assert chooser.drafted(6) == pytest.approx(3.0, rel=0.05)


def test_a_slower_machine_is_noticed_where_nothing_is_measured_too() -> None:
    chooser = lengths_for(plain=CostTable([1, 11], [1.0, 2.0]), step=CostTable([1, 11], [0.1, 0.2]))
    for _ in range(100):
        chooser.observe_costs(6, 1.5 * 1.3, [], 0.0)
    assert 1.02 * 1.5 < chooser.drafted(6) < 1.3 * 1.5


def test_the_first_draft_step_counts_by_what_it_reads() -> None:
    """Three requests read four tokens each and take two more steps: 12 rows, then 3 and 3."""
    table = CostTable([1, 3, 12], [1.0, 1.0, 1.0])
    chooser = lengths_for(plain=CostTable([1, 11], [1.0, 2.0]), step=table)
    for _ in range(300):
        chooser.observe_costs(6, 1.5, [3, 3, 3], 4.0 + 2 * 1.5, read=12)
        chooser.observe_costs(6, 1.5, [3], 4.0, read=12)
    assert chooser.step(12) == pytest.approx(4.0, rel=0.1)
    assert chooser.step(3) == pytest.approx(1.5, rel=0.1)


@pytest.mark.parametrize("slots", [1, 8])
@pytest.mark.parametrize("prompt", [4, 12, 100])
@pytest.mark.parametrize("reading", [0.3, 1.0])
def test_the_costs_of_draft_steps_stay_true_over_thousands_of_requests(
    slots: int, prompt: int, reading: float
) -> None:
    """Requests of eight rounds begin by reading a prompt, of which a row takes `reading` of the usual time. What is
    learned from the sum of the times of all steps divides it as it is divided."""

    def seconds(rows: int) -> float:
        usual = 2 * slots
        return 16.0 + 4.0 * min(rows, usual) + reading * 4.0 * max(0, rows - usual)

    counts = [1, 2] if slots == 1 else [1, 2, 4, 8, 16]
    chooser = lengths_for(
        plain=CostTable([1, 9 * slots], [500.0, 1300.0]), step=CostTable(counts, [seconds(c) for c in counts])
    )
    rng = random.Random(0)
    for _ in range(10_000):
        begins = [rng.random() < 1 / 8 for _ in range(slots)]
        read = sum(prompt if one else 2 if rng.random() < 0.9 else 1 for one in begins)
        draft_s = (seconds(read) + 5 * seconds(slots)) * rng.lognormvariate(0, 0.1)
        chooser.observe_costs(7 * slots, chooser.drafted(7 * slots), [slots] * 6, draft_s, read=read)

    for rows in (slots, 2 * slots):
        assert chooser.step(rows) == pytest.approx(seconds(rows), rel=0.25)


@pytest.mark.parametrize("seed", range(3))
def test_drafting_does_not_end_while_some_requests_are_predicted_well(seed: int) -> None:
    """One request at a time, of thirty tokens, whose draft tokens are accepted with a chance of its own. A choice
    whose gain falls to nothing is kept for the time being; the next one must come."""
    rng = random.Random(seed)
    round_s, step_s = (
        CostTable([1, 2, 4, 8, 9], [0.5, 0.62, 0.88, 1.28, 1.36]),
        CostTable([1, 2], [0.02, 0.033]),
    )
    chooser = lengths_for(plain=round_s.copy(), step=step_s.copy())
    request, rate, left = Acceptance(), 0.98, 30
    drafted_by_block = []
    for _ in range(12):
        drafted = 0
        for _ in range(1000):
            (length,) = chooser.lengths([request], [left - 1])
            accepted = next((at for at in range(length) if rng.random() >= rate), length)
            draft_s = length * step_s(1)
            chooser.observe_costs(1 + length, round_s(1 + length), [1] * length, draft_s, read=min(length, 1))
            chooser.observe_acceptance(request, accepted, min(length, accepted + 1))
            drafted, left = drafted + length, left - accepted - 1
            if left <= 0:
                request, rate, left = Acceptance(), rng.choice([0.98, 0.9, 0.8, 0.3]), 30
        drafted_by_block.append(drafted)

    assert min(drafted_by_block) > 500, drafted_by_block


def test_what_longer_contexts_cost_is_not_taken_for_the_rows() -> None:
    """Few rows in long contexts, many in short ones: the same seconds, and the points stay where they were."""
    table = CostTable([1, 11], [1.0, 2.0], key_s=0.001)
    for _ in range(100):
        table.observe(1, 2.0, keys=1000)
        table.observe(11, 2.0, keys=0)
    assert (table(1), table(11)) == pytest.approx((1.0, 2.0), rel=0.01)
    assert table(1, 1000) == pytest.approx(2.0, rel=0.01)


def test_more_rows_that_were_found_cheaper_are_believed() -> None:
    """Two measured points that contradict each other meet in between; neither drifts away while it changes
    nothing."""
    table = CostTable([32, 64], [1.0, 1.0])
    for _ in range(100):
        table.observe(48, 1.6)
        table.observe(64, 1.0)
    assert 1.0 < table(64) < 1.5
    assert min(table.seconds) > 0.95


def test_one_measured_count_is_what_every_count_costs() -> None:
    assert CostTable([4], [2.0])(9) == 2.0


def test_a_round_that_took_no_time_was_not_measured() -> None:
    table = CostTable([1, 11], [1.0, 2.0])
    table.observe(6, 0.0)
    assert (table(1), table(11)) == (1.0, 2.0)


@pytest.mark.parametrize(("counts", "seconds"), [([], []), ([2, 1], [1.0, 1.0]), ([1], [1.0, 2.0])])
def test_a_cost_table_must_make_sense(counts: list[int], seconds: list[float]) -> None:
    with pytest.raises(ValueError, match="cost table"):
        CostTable(counts, seconds)
