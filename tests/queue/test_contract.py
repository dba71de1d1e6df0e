"""What the queue promises, on the pure ledger and on every Redis-like server alike."""

from __future__ import annotations

import dataclasses

import pytest

from leeway.config import OverBudget
from leeway.errors import DataError, FencedError
from tests.queue.cases import Driver, entry, names, new_task, settings, task_id_of
from trajectory_queue import commands as c
from trajectory_queue.commands import Failure, Lane, Wait

# Enqueueing --------------------------------------------------------------------------------------


async def test_a_task_is_added_once(queue: Driver) -> None:
    await queue.start()
    assert await queue.enqueue(new_task(0), new_task(1)) == c.Enqueued(2, 0)
    assert await queue.enqueue(new_task(1), new_task(2)) == c.Enqueued(1, 1)
    assert (await queue.report()).enqueued == 3


async def test_a_committed_task_stays_known_after_its_checkpoint(queue: Driver) -> None:
    await queue.start(tasks=2)
    for lease in (await queue.lease()).leases:
        await queue.complete(lease)
    await queue.step(0)
    assert (await queue.apply(c.Checkpointed(1, 1))).count == 2
    assert (await queue.enqueue(new_task(0))).duplicates == 1
    # A push that comes late for it needs nothing.
    assert (await queue.push(entry("gone", "t0", 0))).duplicates == ("t0/0",)


# Admission ---------------------------------------------------------------------------------------


async def test_admission_stops_at_the_budget_and_says_so(queue: Driver) -> None:
    await queue.start(tasks=9, budget=1, batch_groups=2)
    leased = await queue.lease()
    assert [task_id_of(lease) for lease in leased.leases] == ["t0", "t1", "t2", "t3"]
    refused = await queue.lease()
    assert (refused.leases, refused.wait) == ((), Wait.BUDGET)
    assert (refused.outstanding, refused.capacity) == (4, 4)


async def test_a_commit_frees_a_whole_batch_for_one_call(queue: Driver) -> None:
    """With eta = 0 one call after a commit hands out the next batch: sync mode builds on it."""
    await queue.start(tasks=8, budget=0)
    for version in range(3):
        leased = await queue.lease(version=version)
        assert [task_id_of(lease) for lease in leased.leases] == [
            f"t{2 * version}",
            f"t{2 * version + 1}",
        ]
        assert (await queue.lease(version=version)).wait is Wait.BUDGET
        for lease in leased.leases:
            await queue.complete(lease, version=version)
        await queue.step(version)


async def test_what_was_consumed_counts_not_what_a_formula_expects(queue: Driver) -> None:
    """Batches may be of any size: a version that took one group frees one place, not B."""
    await queue.start(tasks=9, budget=1, batch_groups=2)
    for lease in (await queue.lease()).leases:
        await queue.complete(lease)
    await queue.commit(await queue.batch(0, groups=1), 1)
    leased = await queue.lease(version=1)
    assert (len(leased.leases), leased.outstanding, leased.capacity) == (1, 4, 4)


async def test_a_node_with_old_weights_is_told_what_it_needs(queue: Driver) -> None:
    await queue.start(tasks=8, budget=0)
    for lease in (await queue.lease()).leases:
        await queue.complete(lease)
    await queue.step(0)
    refused = await queue.lease(version=0)
    assert (refused.leases, refused.wait, refused.needs_version) == ((), Wait.VERSION, 1)
    assert len((await queue.lease(version=1)).leases) == 2


async def test_old_weights_get_what_will_still_be_fresh_enough(queue: Driver) -> None:
    await queue.start(tasks=20, budget=2)
    for lease in (await queue.lease(2)).leases:
        await queue.complete(lease)
    await queue.step(0)  # Version 1, nothing outstanding: the next two enter at 1, then at 2, 3.
    assert len((await queue.lease(version=0)).leases) == 4
    assert (await queue.lease(version=0)).needs_version == 1
    assert len((await queue.lease(version=1)).leases) == 2


async def test_evaluation_goes_first_and_needs_no_budget(queue: Driver) -> None:
    await queue.start(tasks=4, budget=0)
    await queue.lease()
    await queue.enqueue(*(new_task(n, lane=Lane.EVAL) for n in range(3)))
    leased = await queue.lease(2)
    assert [lease.task for lease in leased.leases] == [b"task 0", b"task 1"]
    assert (await queue.report()).eval_groups["running"] == 2


async def test_evaluation_waits_for_the_policy_that_it_judges(queue: Driver) -> None:
    await queue.start(tasks=2, budget=0)
    await queue.enqueue(new_task(0, lane=Lane.EVAL, min_version=5))
    leased = await queue.lease(version=4)
    assert len(leased.leases) == 2  # Training goes on.
    assert (await queue.lease(version=4)).needs_version == 5
    assert len((await queue.lease(version=5)).leases) == 1


async def test_a_repeated_request_gets_the_same_leases(queue: Driver) -> None:
    await queue.start(tasks=4)
    command = c.LeaseTasks("node", 0, 2, "again")
    first = await queue.apply(command)
    assert await queue.apply(command) == first
    assert (await queue.report()).groups["running"] == 2


async def test_pause_and_drain(queue: Driver) -> None:
    await queue.start(tasks=4)
    await queue.apply(c.Pause(True, "operator"))
    assert (await queue.lease()).wait is Wait.PAUSED
    await queue.apply(c.Pause(False, "operator"))
    (lease,) = (await queue.lease(1)).leases
    await queue.apply(c.Drain("operator"))
    draining = await queue.lease()
    assert (draining.wait, draining.run_finished) == (Wait.DRAINING, False)
    await queue.complete(lease)
    assert (await queue.lease()).run_finished


async def test_the_budget_changes_at_run_time_and_survives_a_restart(queue: Driver) -> None:
    await queue.start(tasks=20, budget=1)
    assert (await queue.apply(c.SetBudget(3, "operator"))).previous == 1
    assert len((await queue.lease()).leases) == 8
    await queue.apply(c.Configure(settings(budget=1)))
    assert (await queue.report()).budget == 3
    await queue.apply(c.Configure(settings(budget=2)))
    assert (await queue.report()).budget == 2


async def test_what_operators_change_is_audited_newest_first(queue: Driver) -> None:
    await queue.start(tasks=1, budget=1)
    await queue.apply(c.SetBudget(3, "ada"))
    queue.backend.now += 500
    await queue.apply(c.Pause(True, "bob"))
    audited = (await queue.apply(c.ListAudit(10))).records
    assert [(r.actor, r.what) for r in audited] == [("bob", "pause"), ("ada", "budget 1 -> 3")]
    assert audited[0].at_ms - audited[1].at_ms == 500
    assert (await queue.apply(c.ListAudit(1))).records == audited[:1]


# Leases ------------------------------------------------------------------------------------------


async def test_an_expired_lease_goes_to_another_node_then_to_the_dead(queue: Driver) -> None:
    await queue.start(tasks=1, max_attempts=2)
    (first,) = (await queue.lease()).leases
    queue.backend.now += 1_001
    assert (await queue.apply(c.Expire())).count == 1
    (second,) = (await queue.lease(node="other")).leases
    assert (second.attempt, second.task) == (2, first.task)
    queue.backend.now += 1_001
    await queue.apply(c.Expire())
    (dead,) = (await queue.apply(c.ListDead(10))).tasks
    assert dead.task_id == "t0"
    assert dead.reasons == (
        "infrastructure: node node fell silent; lease expired",
        "infrastructure: node other fell silent; lease expired",
    )


async def test_a_heartbeat_keeps_leases_and_tells_which_are_lost(queue: Driver) -> None:
    await queue.start(tasks=2)
    kept, lost = (await queue.lease()).leases
    queue.backend.now += 900
    extended = await queue.apply(c.Extend("node", 0, (c.Progress(kept.lease_id, 1),)))
    assert extended.lost == ()
    queue.backend.now += 900
    extended = await queue.apply(c.Extend("node", 0, (c.Progress(kept.lease_id, 1),)))
    await queue.apply(c.Expire())
    progress = tuple(c.Progress(lease.lease_id, 2) for lease in (kept, lost))
    extended = await queue.apply(c.Extend("node", 0, progress))
    assert extended.lost == (lost.lease_id,)


async def test_a_lease_that_gets_nowhere_is_taken_although_its_node_lives(queue: Driver) -> None:
    await queue.start(tasks=2, stall_ms=2_000)
    moving, stuck = (await queue.lease()).leases
    for tokens in range(4):
        queue.backend.now += 700
        progress = (c.Progress(moving.lease_id, tokens), c.Progress(stuck.lease_id, 0))
        lost = (await queue.apply(c.Extend("node", 0, progress))).lost
        assert lost == ((stuck.lease_id,) if tokens >= 2 else ())
        if lost:
            break
    assert (await queue.apply(c.Inspect("t1"))).reasons == ("infrastructure: stalled at 0 tokens",)


async def test_one_node_cannot_touch_the_leases_of_another(queue: Driver) -> None:
    await queue.start(tasks=1)
    (lease,) = (await queue.lease()).leases
    progress = (c.Progress(lease.lease_id, 1),)
    assert (await queue.apply(c.Extend("thief", 0, progress))).lost == (lease.lease_id,)
    await queue.apply(c.Fail("thief", lease.lease_id, Failure.DATA, "mine now"))
    await queue.apply(c.GiveBack("thief", lease.lease_id, ()))
    assert (await queue.report()).groups["running"] == 1


async def test_a_clock_that_jumps_back_stands_still(queue: Driver) -> None:
    await queue.start(tasks=1)
    queue.backend.now = 500_000
    (lease,) = (await queue.lease()).leases
    queue.backend.now = 1_000
    assert (await queue.apply(c.Expire())).count == 0
    progress = (c.Progress(lease.lease_id, 1),)
    assert (await queue.apply(c.Extend("node", 0, progress))).lost == ()


async def test_a_drained_node_gives_partials_back_and_loses_no_attempt(queue: Driver) -> None:
    await queue.start(tasks=1, max_attempts=1)
    (lease,) = (await queue.lease()).leases
    await queue.push(entry(lease.lease_id, "t0", 1))
    partials = (c.Partial(0, b"half of it"), c.Partial(1, b"done already"))
    await queue.apply(c.GiveBack("node", lease.lease_id, partials))
    (again,) = (await queue.lease(node="other")).leases
    assert (again.done, again.partials) == ((1,), (b"half of it",))
    await queue.push(entry(again.lease_id, "t0", 0))
    report = await queue.report()
    assert report.groups["queued"] == 1
    assert report.payload_bytes == 2 * len(b"t0/0 of version 0")


async def test_bad_data_is_dead_at_once_and_can_be_requeued(queue: Driver) -> None:
    await queue.start(tasks=2)
    first, second = (await queue.lease()).leases
    await queue.apply(c.Fail("node", first.lease_id, Failure.DATA, "prompt too long"))
    await queue.apply(c.Fail("node", second.lease_id, Failure.REWARD, "scorer hung"))
    report = await queue.report()
    assert (report.groups["dead"], report.groups["waiting"]) == (1, 1)
    assert (await queue.apply(c.Requeue((), "operator"))).count == 1
    (lease, _) = (await queue.lease()).leases
    assert (lease.task, lease.attempt) == (b"task 0", 2)
    assert (await queue.apply(c.Inspect("t0"))).reasons == ("data: prompt too long",)


async def test_a_short_group_is_trained_when_attempts_are_used_up(queue: Driver) -> None:
    await queue.start(max_attempts=1, min_group=2)
    await queue.enqueue(new_task(0, size=3), new_task(1, size=3))
    first, second = (await queue.lease()).leases
    for index in range(2):
        await queue.push(entry(first.lease_id, "t0", index))
    await queue.push(entry(second.lease_id, "t1", 0))
    for lease in (first, second):
        await queue.apply(c.Fail("node", lease.lease_id, Failure.REWARD, "scorer hung"))
    report = await queue.report()
    assert (report.groups["queued"], report.groups["dead"]) == (1, 1)
    assert report.counters["short_groups"] == 1


# Pushing -----------------------------------------------------------------------------------------


async def test_a_push_is_idempotent(queue: Driver) -> None:
    await queue.start(tasks=1)
    (lease,) = (await queue.lease()).leases
    one = entry(lease.lease_id, "t0", 0)
    assert (await queue.push(one)).accepted == ("t0/0",)
    assert (await queue.push(one)).duplicates == ("t0/0",)
    # Another node may have made the same sample under another name.
    twin = dataclasses.replace(one, trajectory_id="twin")
    assert (await queue.push(twin)).duplicates == ("twin",)
    assert (await queue.report()).payload_bytes == len(one.payload)


async def test_a_late_push_of_an_expired_lease_is_not_lost(queue: Driver) -> None:
    await queue.start(tasks=1)
    (lease,) = (await queue.lease()).leases
    queue.backend.now += 1_001
    await queue.apply(c.Expire())
    await queue.complete(lease)
    assert (await queue.report()).groups["queued"] == 1


async def test_a_late_push_never_lifts_the_bound(queue: Driver) -> None:
    await queue.start(tasks=5, budget=0, batch_groups=2)
    late = (await queue.lease()).leases
    queue.backend.now += 1_001
    await queue.apply(c.Expire())
    assert len((await queue.lease(1)).leases) == 1  # t0 again; t1 waits.
    await queue.enqueue(new_task(9))
    await queue.complete(late[0])
    other = await queue.lease(1, node="other")  # t1 again.
    assert task_id_of(other.leases[0]) == "t1"
    queue.backend.now += 1_001
    await queue.apply(c.Expire())
    await queue.complete(late[1])
    report = await queue.report()
    assert report.groups["running"] + report.groups["queued"] + report.groups["leased"] <= 2


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"task_id": "stranger"}, "task_id"),
        ({"task_id": "t1"}, "task_id"),
        ({"index": 2}, "index"),
        ({"newest": 1}, "versions"),
        ({"largest_id": 100}, "token_ids"),
        ({"sampling": "temperature 2"}, "sampling"),
    ],
)
async def test_the_door_names_the_fault_and_the_lease_loses_an_attempt(
    queue: Driver, changes: dict[str, object], field: str
) -> None:
    await queue.start(tasks=2)
    lease = (await queue.lease()).leases[0]
    pushed = await queue.push(dataclasses.replace(entry(lease.lease_id, "t0", 0), **changes))
    assert [refused.field for refused in pushed.refused] == [field]
    report = await queue.report()
    assert report.groups["waiting"] == 1
    assert report.counters[f"refused_{field}"] == 1
    (reason,) = (await queue.apply(c.Inspect("t0"))).reasons
    assert reason.startswith(f"infrastructure: refused: {field} = ")


async def test_a_refusal_of_the_service_counts_like_one_of_the_ledger(queue: Driver) -> None:
    await queue.start(tasks=1, max_attempts=1)
    (lease,) = (await queue.lease()).leases
    refused = c.Refused("t0/0", "logprobs", "NaN", "they must be finite")
    pushed = await queue.apply(c.Push((), (c.AtTheDoor(lease.lease_id, refused),)))
    assert pushed.refused == (refused,)
    assert (await queue.report()).groups["dead"] == 1


async def test_a_version_whose_commit_is_under_way_is_waited_for(queue: Driver) -> None:
    await queue.start(tasks=4)
    first, second, third, _ = (await queue.lease()).leases
    await queue.complete(first)
    await queue.complete(second)
    batch = await queue.batch(0)
    early = entry(third.lease_id, "t2", 0, version=1)
    assert (await queue.apply(c.Push((early,), patient=True))).ahead
    await queue.commit(batch, 1)
    assert (await queue.apply(c.Push((early,), patient=True))).accepted == ("t2/0",)


async def test_a_full_queue_holds_pushes_back_while_a_batch_is_there_to_take(
    queue: Driver,
) -> None:
    size = len(b"t0/0 of version 0")
    await queue.start(tasks=6, max_bytes=5 * size)
    first, second, third, _ = (await queue.lease()).leases
    # Until the trainer has a batch to take, pushes pass: or nothing would ever move.
    await queue.complete(first)
    await queue.complete(second)
    await queue.push(entry(third.lease_id, "t2", 0))
    held = entry(third.lease_id, "t2", 1)
    assert (await queue.push(held)).full
    assert (await queue.lease()).wait is Wait.FULL
    batch = await queue.batch(0)
    await queue.commit(batch, 1)
    await queue.apply(c.Checkpointed(1, 1))
    assert (await queue.push(held)).accepted == ("t2/1",)


async def test_equal_scores_are_filtered_and_the_place_refunded(queue: Driver) -> None:
    await queue.start(tasks=6, budget=0, batch_groups=2, filter_equal_scores=True)
    first, second = (await queue.lease()).leases
    await queue.push(*(entry(first.lease_id, "t0", i, score=0.25) for i in range(2)))
    await queue.complete(second)
    (third,) = (await queue.lease()).leases
    assert task_id_of(third) == "t2"
    await queue.complete(third)
    batch = await queue.step(0)
    assert names(batch) == ["t1", "t2"]
    assert batch.untrained == c.Untrained(groups=1, trajectories=2, score_sum=0.5)
    assert (await queue.report()).groups["filtered"] == 1


async def test_groups_with_a_response_too_long_are_filtered(queue: Driver) -> None:
    await queue.start(tasks=2, filter_longer_than=8)
    first, second = (await queue.lease()).leases
    await queue.push(*(entry(first.lease_id, "t0", i, tokens=8 + i) for i in range(2)))
    await queue.push(*(entry(second.lease_id, "t1", i, tokens=8) for i in range(2)))
    report = await queue.report()
    assert (report.groups["filtered"], report.groups["queued"]) == (1, 1)
    assert report.counters["filtered_too_long"] == 1


async def test_evaluation_is_never_filtered(queue: Driver) -> None:
    await queue.start(filter_equal_scores=True)
    await queue.enqueue(new_task(0, lane=Lane.EVAL))
    (lease,) = (await queue.lease()).leases
    await queue.push(*(entry(lease.lease_id, "e0", i, score=1.0) for i in range(2)))
    assert (await queue.report()).eval_groups["queued"] == 1


# Batches -----------------------------------------------------------------------------------------


async def test_the_oldest_group_goes_first(queue: Driver) -> None:
    await queue.start(tasks=8, budget=2)
    for lease in (await queue.lease(2)).leases:
        await queue.complete(lease)
    late = (await queue.lease(1)).leases[0]
    await queue.step(0)
    for lease in (await queue.lease(2, version=1)).leases:
        await queue.complete(lease, version=1)
    await queue.complete(late, version=0)
    assert names(await queue.batch(1)) == ["t2", "t3"]


async def test_a_batch_fills_as_groups_complete_and_is_kept_for_its_trainer(queue: Driver) -> None:
    await queue.start(tasks=4)
    leases = (await queue.lease()).leases
    await queue.complete(leases[0])
    first = await queue.batch(0)
    assert (names(first), first.full, first.running) == (["t0"], False, 3)
    assert (await queue.report()).trainer_has == 1
    await queue.complete(leases[1])
    await queue.complete(leases[2])
    again = await queue.batch(0)
    assert (again.batch_id, names(again), again.full) == (first.batch_id, ["t0", "t1"], True)
    assert await queue.batch(0) == again
    fetched = await queue.apply(c.Fetch(("t0",)))
    assert fetched.payloads == (c.Payload(b"task 0", (b"t0/0 of version 0", b"t0/1 of version 0")),)


async def over_budget_queue(queue: Driver, policy: OverBudget, **changes: object) -> None:
    """At version 3 with a budget of 1: t0 half too old, t1 too old, t2 fresh."""
    await queue.start(tasks=3, budget=5, batch_groups=1, over_budget=policy, **changes)
    first, second, third = (await queue.lease()).leases
    await queue.enqueue(*(new_task(n) for n in range(10, 13)))
    for version in range(3):
        (lease,) = (await queue.lease(1, version=version)).leases
        await queue.complete(lease, version=version)
        batch = await queue.batch(version, groups=1)
        await queue.commit(batch, version + 1)
    await queue.push(
        entry(first.lease_id, "t0", 0, oldest=1, newest=3),
        entry(first.lease_id, "t0", 1, oldest=0, newest=0),
    )
    await queue.complete(second, version=1)
    await queue.complete(third, version=3)
    await queue.apply(c.SetBudget(1, "test"))


async def test_mask_takes_old_tokens_out_and_ends_what_is_all_too_old(queue: Driver) -> None:
    await over_budget_queue(queue, OverBudget.MASK)
    batch = await queue.batch(3, groups=3)
    assert [(g.task_id, g.staleness, g.in_flight, g.mask_below) for g in batch.groups] == [
        ("t0", 3, 3, 2),
        ("t2", 0, 0, None),
    ]
    report = await queue.report()
    assert (report.groups["stale"], report.counters["masked"]) == (1, 1)
    assert report.counters["dropped_trajectories"] == 2


async def test_drop_ends_or_reissues_and_refunds(queue: Driver) -> None:
    await over_budget_queue(queue, OverBudget.DROP, max_reissues=1)
    assert names(await queue.batch(3, groups=3)) == ["t2"]
    report = await queue.report()
    assert (report.groups["waiting"], report.counters["reissued"]) == (2, 2)
    for _ in range(2):  # t2 is in the batch: there is room for one more.
        (lease,) = (await queue.lease(version=3)).leases
        await queue.complete(lease, version=0)
        assert names(await queue.batch(3, groups=3)) == ["t2"]
    assert (await queue.report()).groups["stale"] == 2


async def test_drop_paces_first(queue: Driver) -> None:
    """A slow group that the next version would make stale holds the batch, within the patience."""
    await queue.start(tasks=4, budget=0, over_budget=OverBudget.DROP, patience_ms=5_000)
    fast, slow = (await queue.lease()).leases
    await queue.complete(fast)
    held = await queue.batch(0, groups=1)
    assert (names(held), held.full, held.awaited) == ([], False, 1)
    queue.backend.now += 900
    await queue.apply(c.Extend("node", 0, (c.Progress(slow.lease_id, 3),)))
    await queue.complete(slow)
    batch = await queue.batch(0, groups=2)
    assert names(batch) == ["t0", "t1"]
    await queue.commit(batch, 1)

    fast, slow = (await queue.lease(version=1)).leases
    await queue.complete(fast, version=1)
    assert not (await queue.batch(1, groups=1)).full
    queue.backend.now += 5_001
    impatient = await queue.batch(1, groups=1)
    assert (names(impatient), impatient.full) == (["t2"], True)


async def test_keep_is_counted_never_hidden(queue: Driver) -> None:
    await over_budget_queue(queue, OverBudget.KEEP)
    batch = await queue.batch(3, groups=3)
    assert names(batch) == ["t0", "t1", "t2"]
    assert all(group.mask_below is None for group in batch.groups)
    assert (await queue.report()).counters["kept_over_budget"] == 2


async def test_a_group_without_a_trainable_token_is_never_stale(queue: Driver) -> None:
    await queue.start(tasks=1, batch_groups=1)
    (lease,) = (await queue.lease()).leases
    await queue.push(*(entry(lease.lease_id, "t0", i, oldest=None, newest=None) for i in range(2)))
    batch = await queue.batch(0, groups=1)
    assert [(g.staleness, g.mask_below) for g in batch.groups] == [(0, None)]


async def test_evaluation_is_fetched_by_task_and_the_dead_do_not_hold_it_up(queue: Driver) -> None:
    await queue.start(max_attempts=1)
    await queue.enqueue(*(new_task(n, lane=Lane.EVAL) for n in range(3)))
    first, second, _ = (await queue.lease()).leases
    for index in range(2):
        await queue.push(entry(first.lease_id, "e0", index))
    wanted = ("e0", "e1")
    assert not (await queue.batch(0, lane=Lane.EVAL, task_ids=wanted)).full
    await queue.apply(c.Fail("node", second.lease_id, Failure.DATA, "unreadable"))
    batch = await queue.batch(0, lane=Lane.EVAL, task_ids=wanted)
    assert (names(batch), batch.full) == (["e0"], True)
    assert await queue.commit(batch, 0) == 1
    assert (await queue.report()).version == 0


# Commits, fencing, resuming ----------------------------------------------------------------------


async def trained(queue: Driver, steps: int) -> list[list[str]]:
    """Trains so many batches; the task ids of each."""
    await queue.start(tasks=2 * steps + 4, budget=0)
    batches = []
    for version in range(steps):
        for lease in (await queue.lease(version=version)).leases:
            await queue.complete(lease, version=version)
        batches.append(names(await queue.step(version)))
    return batches


async def test_a_commit_is_idempotent_and_moves_the_version_up(queue: Driver) -> None:
    await queue.start(tasks=2)
    for lease in (await queue.lease()).leases:
        await queue.complete(lease)
    batch = await queue.batch(0)
    with pytest.raises(DataError, match="a commit needs one above 0"):
        await queue.commit(batch, 0)
    assert await queue.commit(batch, 3) == 2  # Versions may skip.
    assert await queue.commit(batch, 3) == 2
    assert (await queue.report()).version == 3
    with pytest.raises(DataError, match="not leased by trainer"):
        await queue.commit(dataclasses.replace(batch, batch_id="unknown"), 4)


async def test_an_old_life_that_wakes_up_is_refused(queue: Driver) -> None:
    await queue.start(tasks=2)
    for lease in (await queue.lease()).leases:
        await queue.complete(lease)
    batch = await queue.batch(0)
    await queue.apply(c.Resume("trainer", 0, 0))
    for command in (
        c.Commit("trainer", 1, batch.batch_id, 1),
        c.Release("trainer", 1, batch.batch_id),
        c.Checkpointed(1, 1),
        c.Enqueue(1, (new_task(7),)),
        c.LeaseBatch("trainer", 1, 0, 2, Lane.TRAIN, (), "late"),
        c.Resume("trainer", 1, 0),
    ):
        with pytest.raises(FencedError):
            await queue.apply(command)
    report = await queue.report()
    assert (report.version, report.groups["queued"]) == (0, 2)


async def test_a_resume_puts_back_what_was_committed_after_the_checkpoint(queue: Driver) -> None:
    batches = await trained(queue, 3)
    await queue.apply(c.Checkpointed(1, 1))
    resumed = await queue.apply(c.Resume("trainer", 0, 1))
    assert resumed == c.Resumed(incarnation=2, restored=4)
    queue.incarnation = 2
    # The same batches in the same order: the resumed run is the uninterrupted one.
    assert [names(await queue.step(version)) for version in (1, 2)] == batches[1:]
    assert (await queue.report()).groups["committed"] == 6


async def test_what_a_dead_life_had_leased_is_queued_again(queue: Driver) -> None:
    await trained(queue, 1)
    for lease in (await queue.lease(version=1)).leases:
        await queue.complete(lease, version=1)
    held = names(await queue.batch(1))
    queue.incarnation = (await queue.apply(c.Resume("trainer", 0, 1))).incarnation
    assert names(await queue.batch(1)) == held


async def test_pushes_under_way_while_the_trainer_resumes_are_taken(queue: Driver) -> None:
    """Versions that were published stay published, although the trainer went back."""
    await trained(queue, 3)
    (lease, _) = (await queue.lease(version=3)).leases
    await queue.apply(c.Resume("trainer", 0, 1))
    task_id = task_id_of(lease)
    assert (await queue.push(entry(lease.lease_id, task_id, 0, version=3))).accepted


async def test_payloads_live_until_a_checkpoint_covers_them(queue: Driver) -> None:
    await trained(queue, 2)
    before = (await queue.report()).payload_bytes
    assert before > 0
    assert (await queue.apply(c.Checkpointed(1, 1))).count == 2
    assert (await queue.report()).payload_bytes == before / 2
    assert (await queue.apply(c.Checkpointed(1, 2))).count == 2
    assert (await queue.report()).payload_bytes == 0


async def test_a_checkpoint_lets_go_of_a_few_groups_at_a_time_the_oldest_first(
    queue: Driver,
) -> None:
    await trained(queue, 3)
    freed = [(await queue.apply(c.Checkpointed(1, 2, most=3))).count for _ in range(3)]
    assert freed == [3, 1, 0]
    queue.incarnation = (await queue.apply(c.Resume("trainer", 0, 2))).incarnation
    assert len((await queue.batch(2)).groups) == 2, "what it does not cover is there to be restored"


async def test_an_evaluation_after_the_checkpoint_can_be_done_again(queue: Driver) -> None:
    await trained(queue, 1)
    await queue.enqueue(new_task(0, lane=Lane.EVAL))
    (lease, *_) = (await queue.lease(1, version=1)).leases
    for index in range(2):
        await queue.push(entry(lease.lease_id, "e0", index))
    batch = await queue.batch(1, lane=Lane.EVAL, task_ids=("e0",))
    await queue.commit(batch, 1)
    await queue.apply(c.Checkpointed(1, 1))
    queue.incarnation = (await queue.apply(c.Resume("trainer", 0, 1))).incarnation
    assert names(await queue.batch(1, lane=Lane.EVAL, task_ids=("e0",))) == ["e0"]


async def test_a_released_batch_is_there_again(queue: Driver) -> None:
    await queue.start(tasks=2)
    for lease in (await queue.lease()).leases:
        await queue.complete(lease)
    batch = await queue.batch(0)
    await queue.apply(c.Release("trainer", 1, batch.batch_id))
    again = await queue.batch(0)
    assert names(again) == names(batch)
    assert again.batch_id != batch.batch_id


async def test_counters_for_the_bias_of_dropping(queue: Driver) -> None:
    await trained(queue, 2)
    counters = (await queue.report()).counters
    assert (counters["trained_trajectories"], counters["trained_tokens"]) == (8, 40)


async def test_nothing_is_known_of_a_stranger(queue: Driver) -> None:
    await queue.start(tasks=1)
    assert await queue.apply(c.Inspect("stranger")) == c.Inspected("")
    (lease,) = (await queue.lease()).leases
    await queue.push(entry(lease.lease_id, "t0", 0))
    assert await queue.apply(c.Inspect("t0/0")) == c.Inspected("t0", "running", 1)
