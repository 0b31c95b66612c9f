"""The page of a simulated job in Chromium: what it shows, how one gets about in it, and that it cannot be abused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from selenium.webdriver.common.keys import Keys

from hvdgloo._observe import view
from hvdgloo._observe.samples import Early, Plane, Sample, Saves, Steps
from hvdgloo._observe.trace_control import BusyError, Trace
from hvdgloo._observe.words import measured
from tests.page.support import NARROW, SCREEN, USUAL, WIDE, Chromium, Shown, axe, drag, stays, until, words
from tests.support.observed import EVIL, SimulatedJob

Show = Callable[..., Shown]


def minute(**settings: Any) -> SimulatedJob:
    """A job that has run for a minute."""
    job = SimulatedJob(**settings)
    job.advance(60)
    return job


# What it shows.


def test_the_slow_rank_is_named_at_the_top_with_its_cause(show: Show, browser: Chromium) -> None:
    show(minute(slow=3, cause="stolen"))
    said = words([browser.text("#verdict")])
    assert said.startswith("Rank 3 (h2) was last in 9")
    assert "hypervisor" in said
    assert words(browser.texts("#straggler-list .who")) == "Rank 3 on h2"
    assert "rank 3 cost the most" in str(browser.attribute("#heat .plot", "aria-label"))


def test_without_a_slow_rank_it_says_that_none_is(show: Show, browser: Chromium) -> None:
    show(minute(slow=None))
    assert browser.text("#verdict") == "No rank makes the others wait noticeably."
    assert browser.text("#straggler-list") == "No rank stands out."


def test_what_is_not_known_yet_is_not_shown_as_nothing(show: Show, browser: Chromium) -> None:
    job = SimulatedJob()
    job.observatory.tick()
    show(job)
    assert browser.text("#step-time") == "\u2013"
    assert browser.texts("#split-legend li b") == ["\u2013"] * 3
    assert browser.text("#host-list tbody tr") == "h1up" + "\u2013" * 11
    assert browser.texts("#plots .nothing") == ["nothing yet"] * 5
    assert browser.text("#plane-list .none-yet") == "None is open yet."
    assert browser.shown("#plane-list table") == 0
    assert browser.text("#waits .none-yet") == "Nothing yet."


def test_curves_begin_with_the_first_rate_that_is_known(show: Show, browser: Chromium) -> None:
    job = SimulatedJob()
    job.advance(4)
    series = job.observatory.snapshot().series
    assert series.cpu[1] is None
    assert series.bytes_per_second["gloo"][1] is None
    assert None not in (*series.cpu[2:], *series.bytes_per_second["gloo"][2:], *series.memory[1:])
    assert min(value or 0.0 for value in series.cpu[2:]) > 1
    show(job)
    assert words(browser.texts("#plots figure:nth-child(3) .legend b")) == "906 MB/s 37.8 MB/s"


def test_hosts_show_their_network_disks_and_gpus(show: Show, browser: Chromium) -> None:
    show(minute(gpus=True))
    names = browser.texts("#host-list th")
    row = dict(zip(names, browser.texts("#host-list tbody tr:first-child td"), strict=True))
    said = [words([row[name]]) for name in ("host", "cores", "memory", "received", "read", "written", "GPUs")]
    assert said[:3] == ["h1", "16", "42.9 GB of 68.7 GB"]
    assert said[3:6] == ["236 MB/s", "23.6 MB/s", "0 B/s"]
    assert said[6] == "0: 90 %, 32.2 GB; 1: 90 %, 32.2 GB"


def test_tables_are_not_cut_off_on_a_usual_screen(show: Show, browser: Chromium) -> None:
    show(minute(gpus=True))
    for table in ("#plane-list", "#host-list"):
        wide, room = browser.run(
            "const e = document.querySelector(arguments[0]); return [e.scrollWidth, e.clientWidth]", table
        )
        assert wide <= room, table


def test_the_job_is_seen_in_one_look(show: Show, browser: Chromium) -> None:
    shown = show(minute())
    job = shown.job.observatory.snapshot().job
    assert browser.text("#command") == "hvdgloo-run -np 4 python train.py"
    assert browser.text("#state") == "Running"
    assert browser.text("#steps") == f"{job.steps:,}"
    assert words([browser.text("#size"), browser.text("#size-label")]) == "4 ranks on 2 hosts"
    assert words([browser.text("#step-time")]) == "114 ms"
    shares = words(browser.texts("#split-legend li b")).split(" % ")
    assert [int(share.removesuffix(" %")) for share in shares] == pytest.approx(
        [100 * job.computing, 100 * job.waiting, 100 * job.communicating], abs=0.51
    )
    assert browser.texts(".host-name b") == ["h1", "h2"]
    assert words(browser.texts(".cell > :not(.what)")).split(" rank ") == [
        f"{'rank ' if rank == 0 else ''}{rank} computing" for rank in range(4)
    ]


class Stepless(SimulatedJob):
    """A program in which nothing says where a step ends."""

    def _sample(self, rank: int) -> Sample:
        return msgspec.structs.replace(super()._sample(rank), steps=Steps())


def test_a_program_without_steps_shows_its_operations(show: Show, browser: Chromium) -> None:
    job = Stepless()
    job.advance(60)
    show(job)
    assert browser.shown(".of-steps") == 0
    assert browser.shown(".of-operations") == 1
    assert browser.text("#operations") == f"{job.observatory.snapshot().ranks.operations[0]:,}"
    assert browser.texts(".nothing")[:2] == ["no steps are counted"] * 2


def test_numbers_that_the_program_logs_have_curves_and_its_progress_a_bar(show: Show, browser: Chromium) -> None:
    shown = show(minute(slow=None, logs=True))
    job = shown.job.observatory.snapshot().job
    assert job.progress is not None
    assert browser.texts("#logged-values dt") == ["loss", "val_accuracy"]
    assert browser.texts("#logged-values dd") == [measured(job.logged["loss"]), measured(job.logged["val_accuracy"])]
    assert browser.texts("#logged-plots figcaption b") == ["loss", "val_accuracy"]
    assert browser.shown("#logged-plots canvas") == 2
    assert words([browser.text("#progress-share")]) == f"{int(100 * (job.progress.share or 0))} %"
    said = words([browser.text("#progress-label")])
    assert re.fullmatch(r"epoch \d of 10, step \d+ of 100, about (\d+ min )?\d+ s left", said), said
    width = browser.run(
        "const e = document.querySelector('#progress-bar'); return e.clientWidth / e.parentElement.clientWidth"
    )
    assert width == pytest.approx(job.progress.share, abs=0.02)
    done, track, ground = browser.run(
        "return ['#progress-bar', '.progress-bar', '#summary']"
        ".map((name) => getComputedStyle(document.querySelector(name)).backgroundColor)"
    )
    assert len({done, track, ground}) == 3, "what is left to do is visible"
    gap = browser.run(
        "const at = (name) => document.querySelector(name).getBoundingClientRect();"
        "return at('#size').left - at('#progress').right"
    )
    assert gap < 40, "at 100 % the bar ends where its row does"
    assert browser.run("return document.querySelector('#logged-values wbr') !== null")  # a name breaks at underscores


def test_a_job_of_a_second_has_curves_of_what_it_logged(show: Show, browser: Chromium) -> None:
    job = SimulatedJob(slow=None)
    job.advance(2)
    host, last = job.observatory.samples()[0]
    at = [last.at - 1.3 + 0.1 * n for n in range(13)]
    early = Early(at, [{"loss": 1.0 / (n + 1), **({"accuracy": 0.5} if n == 12 else {})} for n in range(13)])
    logged = [("loss", 1 / 13), ("accuracy", 0.5)]
    job.observatory.observe(host, msgspec.structs.replace(last, doing="ended", logged=logged, early=early))
    job.observatory.ended(0)
    job.observatory.tick()
    show(job)
    browser.wait_for("#logged-plots figcaption", "loss")
    assert browser.shown("#logged-plots figure") == 1, "a single point is no line"
    assert browser.text("#logged-plots .nothing:not([hidden])") == ""


def test_curves_go_on_with_the_seconds_after_what_was_logged_first(browser: Chromium) -> None:
    static = Path(__file__).parents[2] / "hvdgloo/_observe/page/static/logged.js"
    browser.run(f"{static.read_text()}; window.withEarly = withEarly;")
    early = {"at": [10.2, 10.3, 11.4], "logged": {"loss": [9, 8, 7]}}
    series = {"at": [9, 10, 11, 12], "width": 1, "logged": {"loss": [None, 8.5, 6, 5], "late": [None, None, None, 1]}}
    drawn = "return withEarly(arguments[0], arguments[1], arguments[2])"
    loss = browser.run(drawn, series, early, "loss")
    assert (loss["at"], loss["logged"]) == ([10.2, 10.3, 11.4, 11.41, 12], {"loss": [9, 8, 7, 6, 5]})
    late = browser.run(drawn, series, early, "late")
    assert late["logged"] == {"late": [None, None, None, None, 1]}
    assert browser.run(drawn, {**series, "width": 2}, early, "loss")["at"] == series["at"]  # a job of many minutes
    assert browser.run(drawn, series, {"at": [], "logged": {}}, "loss")["logged"] == {"loss": series["logged"]["loss"]}


def test_a_program_that_logs_nothing_shows_no_place_for_it(show: Show, browser: Chromium) -> None:
    show(minute())
    assert browser.shown("#logged") == browser.shown("#progress") == 0


def test_a_number_that_is_not_finite_is_said_and_is_a_gap_in_its_curve(show: Show, browser: Chromium) -> None:
    job = minute(slow=None, logs=True)
    shown = show(job)
    last = job.observatory.samples()[0][1]
    job.observatory.observe("h1", msgspec.structs.replace(last, logged=[("loss", float("nan"))]))
    job.observatory.tick()
    browser.wait_for("#logged-values dd", "not finite")
    browser.wait_for("#event-list", "loss is not a number (NaN) in epoch")
    assert shown.job.observatory.snapshot().series.logged["loss"][-1] is not None  # the mean of what is known


def test_events_are_marked_on_the_charts_and_read_under_the_pointer(show: Show, browser: Chromium) -> None:
    from selenium.webdriver.common.action_chains import ActionChains

    job = minute(slow=None, logs=True)
    job.observatory.event("note", "saved a checkpoint", 0)
    job.advance(60)
    show(job)
    assert browser.shown("#marks") == 1
    for chart in ("#plots figure:nth-child(2)", "#logged-plots figure:first-child"):
        over = browser.find(f"{chart} .u-over")
        browser.run("arguments[0].scrollIntoView({block: 'center'})", over)
        ActionChains(browser.driver).move_to_element_with_offset(over, 0, 0).perform()  # the middle is then
        until(lambda chart=chart: "saved a checkpoint" in browser.text(f"{chart} .time"), "the event is read")
        ActionChains(browser.driver).move_to_element_with_offset(over, 60, 0).perform()
        until(lambda chart=chart: browser.text(f"{chart} .time").startswith("20"), "the time is read elsewhere")


def test_outer_steps_have_short_marks_on_the_charts(show: Show, browser: Chromium) -> None:
    from selenium.webdriver.common.action_chains import ActionChains

    job = SimulatedJob(slow=None, meets_every=200)
    job.advance(60)
    show(job)
    assert len(job.observatory.snapshot().marks) == 3
    browser.wait_for("#marks", "Short lines mark outer steps; point at one to read it.")
    job.observatory.event("note", "saved a checkpoint", 0)
    job.advance(1)
    browser.wait_for("#marks", "Short lines mark outer steps, dashed lines mark events; point at one to read it.")
    over = browser.find("#plots figure:nth-child(2) .u-over")
    browser.run("arguments[0].scrollIntoView({block: 'center'})", over)
    share = (job.observatory.snapshot().marks[0].at - 1_700_000_000) / 61
    width = browser.run("return arguments[0].clientWidth", over)
    ActionChains(browser.driver).move_to_element_with_offset(over, round((share - 0.5) * width), 0).perform()
    until(lambda: "outer step" in browser.text("#plots figure:nth-child(2) .time"), "the mark is read")


def test_commits_have_short_marks_and_many_share_one(show: Show, browser: Chromium) -> None:
    from selenium.webdriver.common.action_chains import ActionChains

    job = SimulatedJob(slow=None)
    job.advance(30)
    host, last = job.observatory.samples()[0]
    job.observatory.observe(host, msgspec.structs.replace(last, saves=[Saves("commit", 12, last.at)]))
    job.observatory.tick()
    job.advance(30)
    show(job)
    browser.wait_for("#marks", "Short lines mark commits; point at one to read it.")
    over = browser.find("#plots figure:nth-child(2) .u-over")
    browser.run("arguments[0].scrollIntoView({block: 'center'})", over)
    (mark,) = job.observatory.snapshot().marks
    share = (mark.at - 1_700_000_000) / 60
    width = browser.run("return arguments[0].clientWidth", over)
    ActionChains(browser.driver).move_to_element_with_offset(over, round((share - 0.5) * width), 0).perform()
    until(lambda: "12 commits" in words([browser.text("#plots figure:nth-child(2) .time")]), "the mark is read")


def test_settings_that_were_changed_come_first_with_units_and_without_nulls(show: Show, browser: Chromium) -> None:
    job = minute()
    settings = {"params.fusion_threshold_mb": 32.0, "params.cycle_time_ms": 5.0, "timeline.filename": None}
    settings |= {"params.deterministic": True, "params.inline_threshold": 1024}
    last = job.observatory.samples()[0][1]
    job.observatory.observe("h1", msgspec.structs.replace(last, settings=settings))
    job.observatory.tick()
    show(job)
    assert browser.texts("#changed-settings dt") == ["params.cycle_time_ms", "params.deterministic"]
    assert words(browser.texts("#changed-settings dd")) == "5 ms on"
    assert browser.texts("#settings dt") == ["params.fusion_threshold_mb", "params.inline_threshold"]
    assert words(browser.texts("#settings dd")) == "32 MiB 1,024 bytes"
    assert "null" not in browser.text("#details")


def test_printing_draws_what_was_never_in_sight_in_the_light_theme(show: Show, browser: Chromium) -> None:
    browser.theme("dark")
    shown = show(minute(), height=SCREEN)
    shown.job.observatory.event("note", "out of sight")
    shown.advance()
    browser.run("window.dispatchEvent(new Event('beforeprint'))")
    assert "out of sight" in browser.text("#event-list")
    assert browser.run("return document.documentElement.style.colorScheme") == "light"
    browser.command("Emulation.setEmulatedMedia", media="print")
    cut = "const e = document.querySelector('#lines'); return e.scrollHeight - e.clientHeight"
    assert browser.run(cut) <= 1
    exact = "return getComputedStyle(document.querySelector('#split > span')).printColorAdjust"
    assert browser.run(exact) == "exact"
    browser.command("Emulation.setEmulatedMedia", media="")
    browser.run("window.dispatchEvent(new Event('afterprint'))")
    assert browser.run("return document.documentElement.style.colorScheme") == "light dark"


def test_failures_that_followed_from_another_rank_s_are_not_red(show: Show, browser: Chromium) -> None:
    shown = show(minute(slow=None))
    shown.job.lose(2, "exited with status 1")
    shown.job.lose(0, "exited with status 1")
    shown.advance()
    browser.wait_for("#event-list", "rank 0 (h1) exited with status 1")
    assert len(browser.texts("#event-list .grave")) == 2  # which of them is to blame is not known yet
    shown.job.observatory.ended(1, "rank 2 exited with status 1", causes=[2])
    shown.advance()
    browser.wait_for("#event-list", "rank 2 exited with status 1")
    until(lambda: len(browser.texts("#event-list .grave")) == 1, "only the cause is red")
    assert browser.text("#event-list .grave p").startswith("rank 2 (h2) exited with status 1")
    browser.run("const kind = document.querySelector('#event-kind'); kind.value = 'failure';"
                "kind.dispatchEvent(new Event('change'))")  # fmt: skip
    until(lambda: len(browser.texts("#event-list .event")) == 2, "failures alone")
    assert len(browser.texts("#event-list .grave")) == 1


def test_lines_of_ranks_that_were_stopped_with_a_failure_are_not_red(show: Show, browser: Chromium) -> None:
    job = minute()
    for rank in (1, 2):
        job.observatory.output(rank, 2, f"an error of rank {rank}\n".encode())
    shown = show(job)
    browser.wait_for("#lines", "an error of rank 2")
    assert browser.texts("#lines .stopped") == []
    job.observatory.worker(1, "failed", "exited with status 1")
    job.observatory.ended(1, "rank 1 on host h1 exited with status 1", causes=[1])
    browser.wait_for("#state", "Failed, exit code 1")
    colour = (
        "const line = document.querySelector(`#lines .error[data-rank='${arguments[0]}'] .text`);"
        "return getComputedStyle(line, '::before').color"
    )
    until(lambda: browser.run(colour, 2) != browser.run(colour, 1), "only one is red")
    assert (
        browser.run("return document.querySelector(\"#lines .error[data-rank='1']\").classList.contains('stopped')")
        is False
    )
    assert shown.job.observatory.snapshot().job.state == "failed"


def test_planes_are_shown_with_their_reasons(show: Show, browser: Chromium) -> None:
    show(minute())
    assert browser.text("#planes-in-use") == "Data goes over gloo (hosts h1 and h2)."
    rows = browser.texts("#plane-list tbody tr")
    assert any(row.startswith("glooall rankshosts h1 and h2") for row in rows), rows


class Encoded(SimulatedJob):
    """Gradients cross between hosts as int8."""

    def _sample(self, rank: int) -> Sample:
        sample = super()._sample(rank)
        flows = [
            msgspec.structs.replace(flow, wire_bytes=flow.bytes // 4, wire_error=0.0091, form="int8")
            for flow in sample.flows
            if flow.plane == "gloo"
        ]
        return msgspec.structs.replace(sample, flows=flows)


def test_a_plane_shows_in_how_many_bytes_tensors_cross_between_hosts(show: Show, browser: Chromium) -> None:
    job = Encoded()
    job.advance(60)
    show(job)
    rows = browser.texts("#plane-list tbody tr")
    (row,) = [row for row in rows if "; between hosts: " in row]
    assert re.search(r"between hosts: [\d.]+ .?B a step instead of [\d.]+ .?B \(int8\), error 0.91 %", row), row


def test_outer_steps_are_part_of_the_summary(show: Show, browser: Chromium) -> None:
    show(minute(meets_every=8))
    said = browser.text("#outer-steps")
    assert re.fullmatch(r"An outer step every 8 steps, 102 MB each, the last [\d.]+ s ago, 3 % of the time.", said), (
        said
    )


class OfTorchDistributed(SimulatedJob):
    """A program whose tensors travel in groups of torch.distributed."""

    def _sample(self, rank: int) -> Sample:
        why = "shared memory: all ranks are on host h1"
        planes = [Plane(f"dist.{kind}", 0, "cpu", why) for kind in ("all_reduce", "broadcast")]
        return msgspec.structs.replace(super()._sample(rank), planes=planes, flows=[])


def test_operations_of_torch_distributed_name_the_plane_that_they_go_over(show: Show, browser: Chromium) -> None:
    job = OfTorchDistributed()
    job.advance(60)
    show(job)
    assert browser.text("#planes-in-use") == "Data goes over shared memory (all ranks are on host h1)."
    rows = browser.texts("#plane-list tbody tr")
    assert [row.partition("all ranks")[0] for row in rows] == ["dist.all_reduce", "dist.broadcast"], rows


def test_what_happens_is_shown_while_it_happens(show: Show, browser: Chromium) -> None:
    shown = show(minute())
    before = browser.text("#steps")
    shown.advance(3)
    assert browser.text("#steps") != before
    assert browser.text("#steps") == f"{shown.job.observatory.snapshot().job.steps:,}"


def test_a_stall_shows_who_is_waited_for_and_its_python_stack(show: Show, browser: Chromium) -> None:
    shown = show(minute())
    shown.job.stall(2)
    shown.advance(2)
    assert browser.text("#verdict").startswith("Ranks 2 have not submitted")
    assert browser.attribute("#verdict", "class") == "verdict bad"
    assert "time.sleep(3600)" in browser.text("#event-list pre")
    assert "waiting" in str(browser.attribute('[data-rank="0"]', "class"))
    assert "waits for rank 2" in browser.text('[data-rank="0"] .what')
    shown.job.resume()
    shown.advance(2)
    assert "have not submitted" not in browser.text("#verdict")


def test_a_killed_rank_is_shown_as_failed_and_then_the_job(show: Show, browser: Chromium) -> None:
    shown = show(minute())
    shown.job.lose(1)
    shown.advance()
    assert "Rank 1 (h1) was killed by SIGKILL" in browser.text("#verdict")
    assert "failed" in str(browser.attribute('[data-rank="1"]', "class"))
    assert "rank 1 (h1) was killed by SIGKILL" in browser.text("#event-list")
    shown.job.observatory.ended(1, "rank 1 (h1) was killed by SIGKILL")
    browser.wait_for("#state", "Failed, exit code 1")
    browser.wait_for("#verdict", "Rank 1 (h1) was killed by SIGKILL")
    assert browser.text("#rate-label") == "steps per second, on average"
    assert float(browser.text("#rate")) == pytest.approx(540 / 61, rel=0.01)


def test_the_cause_of_a_failure_is_red_and_not_those_who_failed_with_it(show: Show, browser: Chromium) -> None:
    shown = show(minute())
    shown.job.observatory.worker(0, "failed", "exited with status 1")
    shown.advance()
    browser.wait_for("#event-list", "rank 0 (h1) exited with status 1")
    shown.job.observatory.ended(3, "rank 1 on host h1 exited with status 3", causes=[1])
    browser.wait_for("#state", "Failed, exit code 3")
    classes = [str(browser.attribute(f'[data-rank="{rank}"]', "class")) for rank in range(4)]
    assert ["failed" in each for each in classes] == [False, True, False, False]


def test_a_job_that_is_stopped_by_a_user_has_not_failed(show: Show, browser: Chromium) -> None:
    shown = show(minute())
    shown.job.observatory.host("h2", "left out")
    shown.job.observatory.ended(130, "stopped by SIGINT", stopped=True, causes=[])
    browser.wait_for("#state", "Stopped")
    assert browser.text("#state") == "Stopped"
    browser.wait_for("#verdict", "Stopped by SIGINT")
    assert "bad" not in str(browser.attribute("#verdict", "class")).split()
    assert "left out" in browser.text("#ranks")


def test_a_job_that_has_ended_says_so_and_who_was_slow(show: Show, browser: Chromium) -> None:
    shown = show(minute())
    shown.job.observatory.ended(0)
    browser.wait_for("#state", "Ended")
    browser.wait_for("#verdict", "The job has ended without an error.")
    assert "Rank 3 (h2) was last" in words([browser.text("#verdict")])
    elapsed = browser.text("#elapsed")
    assert words([elapsed]).startswith("after 60")


def test_an_elastic_job_goes_on_with_fewer_ranks(show: Show, browser: Chromium) -> None:
    shown = show(minute())
    shown.job.lose(3)
    shown.advance()
    shown.job.shrink()
    shown.advance(2)
    assert browser.texts(".cell .number") == ["0", "1", "2"]
    assert "the job goes on with 3 ranks" in browser.text("#event-list")


def test_updates_make_of_a_snapshot_what_a_later_snapshot_is(browser: Chromium) -> None:
    job = SimulatedJob(ranks=6, hosts=3)
    static = Path(__file__).parents[2] / "hvdgloo/_observe/page/static/store.js"
    browser.run(f"{static.read_text()}; Object.assign(window, {{STATES, store: new Store()}});")
    read = (
        "const {job, hosts, planes, stragglers, waits, events, early, marks, series, heat} = store;"
        "const {settings, changed, units, output} = store;"
        "return JSON.stringify({job, hosts, planes, stragglers, waits, events, early, marks, series, heat, settings,"
        " changed, units, output, ranks: store.ranks.map((row) => ({...row, state: STATES.indexOf(row.state)}))})"
    )
    with job.observatory.subscribe() as changes:
        for _ in range(5):
            job.advance(40)
            if job.size == 6:
                job.lose(5)
                job.advance(1)
                job.shrink()
            while (value := changes.next(0)) is not None:
                kind = "replace" if isinstance(value, view.Snapshot) else "update"
                browser.run(f"store.{kind}(JSON.parse(arguments[0]))", view.encode(value).decode())
    wanted = json.loads(view.encode(job.observatory.snapshot()))
    columns = wanted.pop("ranks")
    wanted["ranks"] = [{name: columns[name][i] for name in columns} for i in range(len(columns["rank"]))]
    del wanted["schema"]
    found = json.loads(browser.run(read))
    for part, value in wanted.items():
        assert found[part] == value, part


FORMATTED = {
    "number": {0: "0", 0.01234: "0.0123", 1.234: "1.23", 12.34: "12.3", 1234.5: "1,235"},
    "count": {7: "7", 1234567: "1,234,567", 12345678: "12.3 million", 12345678901: "12.3 billion"},
    "bytes": {
        0: "0 B",
        999: "999 B",
        999.7: "1 kB",
        1536: "1.54 kB",
        999_600: "1 MB",
        12.3e9: "12.3 GB",
        4e18: "4,000 PB",
    },
    "seconds": {
        0: "0 s",
        120e-6: "120 µs",
        0.0138: "13.8 ms",
        0.99999: "1 s",
        12.34: "12.3 s",
        100: "1 min 40 s",
        3599.9: "1 h",
        7500: "2 h 5 min",
        187200: "2 d 4 h",
    },
    "measured": {0: "0", 0.98765: "0.9877", 12345.678: "12,345.7", 1.2346e-5: "0.00001235", 1.2346e-9: "1.235e-9"},
    "cores": {0.0863: "9 % of a core", 1: "1 core", 1.534: "1.53 cores"},
    "share": {0.923: "92 %", 1: "100 %"},
}


def test_numbers_times_and_sizes_are_written_for_people(browser: Chromium) -> None:
    static = Path(__file__).parents[2] / "hvdgloo/_observe/page/static/format.js"
    browser.run(f"{static.read_text()}; window.format = format;")
    for function, cases in FORMATTED.items():
        found = [browser.run("return format[arguments[0]](arguments[1])", function, value) for value in cases]
        assert [text.replace("\u00a0", " ") for text in found] == list(cases.values())


# How one gets about in it.


def test_a_chosen_rank_has_its_details_its_curves_and_its_output(show: Show, browser: Chromium) -> None:
    show(minute(gpus=True))
    browser.click('[data-rank="2"]')
    browser.wait_for("#rank h3", "Rank 2 on h2")
    facts = words(browser.texts("#rank dl > div"))
    assert "process1002, local rank 0" in facts
    assert "GPU0: NVIDIA H100" in facts
    browser.wait_for("#scope", "rank 2")
    until(lambda: "1" in words(browser.texts("#plots figure:nth-child(4) .legend b"))[:1], "one core, of one rank")
    browser.click("#rank .buttons button")
    until(lambda: set(browser.texts(".line .source")) == {"2"}, "only lines of rank 2")
    browser.click("#rank .buttons button:last-child")
    browser.wait_for("#scope", "all ranks")
    until(lambda: browser.shown("#rank") == 0, "no details of a rank")


def test_ranks_are_chosen_by_keys(show: Show, browser: Chromium) -> None:
    show(minute(ranks=8, hosts=2))
    browser.run("document.querySelector('.cell[tabindex=\"0\"]').focus()")
    browser.press(Keys.ARROW_RIGHT, Keys.ARROW_DOWN, Keys.ARROW_RIGHT)
    assert browser.run("return document.activeElement.dataset.rank") == "6"
    assert browser.text("#readout").startswith("rank 6 on h2: ")
    browser.press(Keys.HOME, Keys.ENTER)
    browser.wait_for("#rank h3", "Rank 4 on h2")
    assert browser.run("return document.querySelectorAll('.cell[tabindex=\"0\"]').length") == 1


def test_ranks_are_filtered_by_host_by_number_and_by_state(show: Show, browser: Chromium) -> None:
    shown = show(minute(ranks=8, hosts=4))
    visible = ".host:not([hidden]) .cell:not([hidden]) .number"
    browser.find("#rank-filter").send_keys("H3")
    until(lambda: browser.texts(visible) == ["4", "5"], "h3's ranks")
    browser.find("#rank-filter").clear()
    browser.find("#rank-filter").send_keys("rank 7")
    until(lambda: browser.texts(visible) == ["7"], "rank 7")
    browser.find("#rank-filter").clear()
    browser.find("#rank-filter").send_keys("nowhere")
    until(lambda: browser.text("#readout") == "No rank matches.", "a word about it")
    browser.find("#rank-filter").clear()
    browser.find("#rank-filter").send_keys(" ")
    shown.job.stall(2)
    shown.advance(2)
    browser.click("#state-filter button:has(.computing)")
    until(lambda: browser.texts(visible) == ["2"], "the only one that computes")


def test_the_table_is_sorted_by_a_click_and_by_keys(show: Show, browser: Chromium) -> None:
    show(minute(ranks=40, hosts=4, slow=17))
    browser.click("#as-table")
    until(lambda: browser.texts("#table tbody td:first-child button")[:3] == ["0", "1", "2"], "by rank at first")
    waiting = "#table th:nth-child(7)"
    browser.focus(f"{waiting} button")
    browser.press(Keys.ENTER)
    until(lambda: browser.attribute(waiting, "aria-sort") == "ascending", "sorted by waiting")
    assert browser.texts("#table tbody td:first-child button")[0] == "17"
    browser.click(f"{waiting} button")
    assert browser.attribute(waiting, "aria-sort") == "descending"
    assert browser.attribute("#table table", "aria-rowcount") == "41"
    browser.run("document.querySelector('#table').scrollTop = 1e6")
    until(lambda: browser.texts("#table tbody td:first-child button")[-1] == "17", "the last row")


def test_dragging_zooms_all_charts_and_a_double_click_shows_all(show: Show, browser: Chromium) -> None:
    from selenium.webdriver.common.action_chains import ActionChains

    show(minute())
    over = "#plots figure:first-child .u-over"
    assert browser.attribute("#spans button:last-child", "aria-pressed") == "true"
    drag(browser, over, 0.25, 0.5)
    until(lambda: browser.attribute("#spans button:last-child", "aria-pressed") == "false", "a part is shown")
    # A quarter of a minute: the same time is under the pointer's middle in another chart.
    middles = []
    for place in (2, 3):
        other = browser.find(f"#plots figure:nth-child({place}) .u-over")
        ActionChains(browser.driver).move_to_element(other).perform()
        until(lambda: browser.text("#plots figure:first-child .time"), "a time")
        middles.append(browser.text("#plots figure:first-child .time"))
    assert middles[0] == middles[1]
    assert middles[0] == browser.text("#plots figure:nth-child(3) .time")
    ActionChains(browser.driver).double_click(browser.find(over)).perform()
    until(lambda: browser.attribute("#spans button:last-child", "aria-pressed") == "true", "all is shown")


def test_charts_are_read_and_zoomed_by_keys(show: Show, browser: Chromium) -> None:
    show(minute())
    browser.focus("#plots figure:nth-child(2) .plot")
    browser.press(Keys.ARROW_LEFT)
    first = until(lambda: browser.text("#announcement"), "a value is said")
    assert "computing" in first
    assert "waiting for other ranks" in first
    browser.press(Keys.ARROW_LEFT)
    until(lambda: browser.text("#announcement") != first, "another value is said")
    browser.press("+")
    assert browser.attribute("#spans button:last-child", "aria-pressed") == "false"
    browser.press("0")
    assert browser.attribute("#spans button:last-child", "aria-pressed") == "true"


def test_the_heat_map_says_what_is_under_the_pointer(show: Show, browser: Chromium) -> None:
    from selenium.webdriver.common.action_chains import ActionChains

    shown = show(minute(slow=1))
    rows = shown.job.observatory.snapshot().heat.rank
    over = browser.find("#heat .u-over")
    browser.run("arguments[0].scrollIntoView({block: 'center'})", over)
    row_height = over.size["height"] / max(5, len(rows))
    down = row_height * (rows.index(1) + 0.5) - over.size["height"] / 2
    ActionChains(browser.driver).move_to_element_with_offset(over, 0, int(down)).perform()
    browser.wait_for("#heat .readout", "for rank 1")
    assert "others waited" in browser.text("#heat .readout")


def test_output_is_followed_searched_and_read_back(show: Show, browser: Chromium) -> None:
    job = minute()
    for n in range(1200):
        job.observatory.output(0, 2 if n % 2 else 1, f"line {n} \x1b[31mred\x07\x1b[0m\n".encode())
    shown = show(job)
    until(lambda: browser.texts(".line .text")[-1:] == ["line 1199 red"], "the latest line")
    assert browser.shown("#lines > button") == 1
    job.observatory.output(3, 1, b"a new one\n")
    shown.advance()
    until(lambda: any("a new one" in text for text in browser.texts(".line .text")), "the new line")
    browser.find("#search").send_keys("LINE 11")
    until(lambda: len(browser.texts(".line .text")) == 111, "lines 11, 110 to 119, 1100 to 1199")
    assert set(browser.texts(".line mark")) == {"line 11"}
    browser.find("#search").clear()
    browser.find("#search").send_keys(" ")
    browser.find("#search").send_keys(Keys.BACKSPACE)
    until(lambda: len(browser.texts(".line")) >= 500, "all again")
    first = int(str(browser.attribute(".line", "data-number")))
    browser.click("#lines > button")
    until(lambda: int(str(browser.attribute(".line", "data-number"))) == first - 500, "500 lines more")
    assert browser.run("return document.querySelector('#follow').checked") is False


def test_lines_that_take_several_rows_are_followed_to_their_end(show: Show, browser: Chromium) -> None:
    job = minute()
    wide = "wide " * 200
    for n in range(400):
        job.observatory.output(0, 1, f"line {n} {wide}\n".encode())
    shown = show(job)
    browser.run("document.querySelector('#output').scrollIntoView({block: 'center'})")
    at_the_end = """
        const list = document.querySelector("#lines");
        const atEnd = list.scrollTop + list.clientHeight >= list.scrollHeight - 8;
        return atEnd && document.querySelector("#follow").checked;
    """
    for n in range(400, 403):
        until(lambda n=n: any(f"line {n - 1} " in text for text in browser.texts(".line .text")), "the latest line")
        until(lambda: stays(browser, at_the_end), "the end is in sight, and stays there")
        job.observatory.output(1, 1, f"line {n} {wide}\n".encode())
        shown.advance()
    browser.run("document.querySelector('#lines').scrollTop -= 2000")
    until(lambda: not browser.run("return document.querySelector('#follow').checked"), "who reads back does not follow")
    job.observatory.output(1, 1, b"another\n")
    shown.advance()
    until(lambda: "another" in browser.texts(".line .text"), "the new line")
    assert not browser.run(at_the_end)


def test_events_are_filtered_by_kind(show: Show, browser: Chromium) -> None:
    job = minute()
    job.observatory.event("warning", "the disk is nearly full")
    job.advance()
    shown = show(job)
    until(lambda: len(browser.texts(".event")) > 1, "more events")
    browser.find("#event-kind option[value=warning]").click()
    until(lambda: browser.texts(".event p") == ["the disk is nearly full"], "the warning alone")
    job.observatory.event("warning", "the disk is full")
    job.observatory.event("elastic", "a host came")
    shown.advance()
    until(lambda: browser.texts(".event p") == ["the disk is full", "the disk is nearly full"], "the new one on top")


class Tracing:
    """Has steps traced; the trace is ready at once, unless this is ``busy``."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.busy = False
        self.made: list[Trace] = []

    def trace(self, steps: int) -> Trace:
        if self.busy:
            raise BusyError("a trace is being made")
        self._path.write_text("[]")
        self.made.append(Trace(len(self.made) + 1, steps, "ready", f"{steps} steps of 4 ranks", 2))
        return self.made[-1]

    def traces(self) -> list[Trace]:
        return list(self.made)

    def path(self, number: int) -> str:
        return str(self._path)


def test_steps_are_traced_where_that_is_allowed(show: Show, browser: Chromium, tmp_path: Path) -> None:
    control = Tracing(tmp_path / "trace.json")
    show(minute(), control=control)
    until(lambda: browser.shown("#trace") == 1, "the form")
    browser.find("#trace-steps").clear()
    browser.find("#trace-steps").send_keys("7")
    browser.click("#trace-form button")
    browser.wait_for("#trace-list", "7 steps of 4 ranks")
    assert [trace.steps for trace in control.made] == [7]
    control.busy = True
    browser.click("#trace-form button")
    browser.wait_for("#trace-list .grave", "a trace is being made")
    browser.expect("409")
    assert browser.run("return fetch(document.querySelector('#trace-list a').href).then((a) => a.text())") == "[]"


def test_no_reader_is_offered_what_is_not_allowed(show: Show, browser: Chromium) -> None:
    show(minute())
    assert browser.shown("#trace") == 0


def test_the_theme_follows_the_system_and_may_be_chosen(show: Show, browser: Chromium) -> None:
    ground = "return getComputedStyle(document.body).backgroundColor"
    show(minute())
    light = browser.run(ground)
    browser.theme("dark")
    dark = until(lambda: (found := browser.run(ground)) != light and found, "the dark theme")
    browser.click("#theme")
    assert (browser.text("#theme"), browser.run(ground)) == ("Theme: light", light)
    browser.click("#theme")
    assert (browser.text("#theme"), browser.run(ground)) == ("Theme: dark", dark)
    browser.click("#theme")
    assert browser.text("#theme") == "Theme: system"


@pytest.mark.parametrize("width", [NARROW, USUAL, WIDE])
@pytest.mark.parametrize("ranks", [4, 200])
def test_nothing_is_wider_than_the_window(show: Show, browser: Chromium, width: int, ranks: int) -> None:
    show(minute(ranks=ranks, hosts=max(2, ranks // 8), evil=True), width=width, fragment="rank-3")
    browser.wait_for("#rank h3", "Rank 3")
    assert browser.run("return document.documentElement.scrollWidth") == width


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize(
    ("width", "ranks", "table"), [(NARROW, 6, False), (USUAL, 6, False), (USUAL, 24, False), (USUAL, 24, True)]
)
def test_axe_finds_nothing(
    show: Show, browser: Chromium, theme: str, width: int, ranks: int, table: bool, tmp_path: Path
) -> None:
    browser.theme(theme)
    job = minute(ranks=ranks, hosts=3, gpus=True)
    job.stall(2)
    job.advance(2)
    shown = show(job, width=width, fragment="rank-3", control=Tracing(tmp_path / "t"))
    job.lose(5)
    shown.advance()
    if table:
        browser.click("#as-table")
    browser.wait_for("#rank h3", "Rank 3")
    assert axe(browser) == []


# Hostile jobs, and strangers.


def test_names_and_lines_do_nothing_but_stand_there(show: Show, browser: Chromium) -> None:
    job = minute(evil=True)
    job.stall(2, stack=EVIL[0])
    shown = show(job, fragment="rank-2")
    for text in EVIL:
        job.observatory.event("warning", text, more=text)
        job.observatory.output(1, 2, f"{text}\n".encode())
    shown.advance(3)
    browser.wait_for("#rank h3", f"Rank 2 on {EVIL[1]}1")
    assert browser.texts(".host-name b") == [EVIL[0] + "0", EVIL[1] + "1"]
    assert EVIL[0] in browser.text("#command")
    assert EVIL[0] in browser.text("#event-list pre")
    until(lambda: any(EVIL[3] in text for text in browser.texts(".line .text")), "the line")
    assert not any("\u202e" in text for text in browser.texts(".line .text"))
    browser.find("#search").send_keys("<img src=x")
    until(lambda: set(browser.texts(".line mark")) == {"<img src=x"}, "what was searched for")
    assert browser.run("return document.querySelectorAll('main img, main script, main svg, main iframe').length") == 0


def test_a_link_works_once(show: Show, browser: Chromium) -> None:
    shown = show(minute())
    link = shown.server.link()
    browser.driver.get(link)
    shown.wait_until_drawn()
    browser.driver.delete_all_cookies()
    browser.expect("401")
    browser.driver.get(link)
    assert browser.run("return document.querySelector('#grid')") is None
    browser.driver.get(shown.server.address)
    assert browser.run("return document.querySelector('#grid')") is None


def test_a_page_whose_cookie_is_no_longer_valid_says_so(show: Show, browser: Chromium) -> None:
    shown = show(minute())
    browser.driver.delete_all_cookies()
    browser.expect("401")
    browser.run("window.refused = null; follow(() => {}, (status) => { window.refused = status; })")
    until(lambda: browser.run("return window.refused") == "refused", "the page knows")
    assert shown.server.watchers <= 2


def test_the_end_of_the_server_is_said_and_what_was_shown_stays(show: Show, browser: Chromium) -> None:
    shown = show(minute())
    assert browser.text("#connection") == "live"
    # Lines may have been asked for when it went.
    browser.expect("ERR_CONNECTION_REFUSED")
    shown.server.stop()
    browser.wait_for("#connection", "the job is over")
    assert browser.text("#state") == "Running"
    assert len(browser.texts(".cell")) == 4
