"""Playbooks inside the gateway: dry run first, start, follow, stop; who may, what is counted, what is never opened."""

from pathlib import Path
from typing import Any

import pytest

BASE = "/control/v1/playbooks"
SHORT = "name: mine\nsteps:\n  - set: {max_num_seqs: 3}\n"
LONG = SHORT + "  - wait: 1h\n"
FAILING = SHORT + "checks:\n  - {expect: running > 0 over 300ms, on_fail: rollback}\n"


async def started(world: Any, **body: Any) -> dict[str, Any]:
    status, run = await world.send("POST", f"{BASE}/start", {"dry_run": False, **body})
    assert status == 200, run
    return dict(run)


async def ended(world: Any, run: dict[str, Any]) -> dict[str, Any]:
    while run["is_running"]:
        _, run = await world.send("GET", f"{BASE}/runs/{run['run_id']}")
    return run


async def test_a_start_is_dry_unless_told_otherwise_and_the_run_does_what_it_said(world: Any) -> None:
    status, dry = await world.send("POST", f"{BASE}/start", {"yaml": SHORT})
    assert status == 200
    assert [(step["verdict"], step["changes"]) for step in dry["planned"]] == [("change", {"max_num_seqs": [64, 3]})]
    assert (await world.snapshot()).generation == 0
    run = await ended(world, await started(world, yaml=SHORT, expect_generation=dry["generation"]))
    assert run["reports"][0]["result"] == "pass" and run["reports"][0]["settings"] == "kept"
    assert run["progress"]["steps"] == [
        {"what": "set max_num_seqs=3", "state": "done", "detail": "max_num_seqs 64 -> 3"}
    ]
    assert (await world.snapshot()).knobs.max_num_seqs == 3
    _, audit = await world.send("GET", "/control/v1/audit")
    change = next(row for row in audit["data"]["rows"] if row["action"] == "SetKnobs")
    assert (change["client"], change["on_behalf_of"]) == ("playbook mine", "operator")


async def test_a_start_on_knobs_that_were_turned_since_the_dry_run_is_refused(world: Any) -> None:
    await world.send("PATCH", "/control/v1/knobs", {"changes": {"max_num_seqs": 5}})
    status, refusal = await world.send(
        "POST", f"{BASE}/start", {"yaml": SHORT, "dry_run": False, "expect_generation": 0}
    )
    assert (status, refusal["error"]["code"]) == (409, "conflict")
    assert (await world.snapshot()).knobs.max_num_seqs == 5


async def test_a_stopped_run_takes_its_changes_back(world: Any) -> None:
    run = await started(world, yaml=LONG)
    await world.until(lambda snapshot: snapshot.knobs.max_num_seqs == 3)
    _, runs = await world.send("GET", f"{BASE}/runs")
    assert [(one["run_id"], one["is_running"]) for one in runs["runs"]] == [(run["run_id"], True)]
    status, stopped = await world.send("POST", f"{BASE}/stop", {"run_id": run["run_id"]})
    assert (status, stopped["is_running"], stopped["was_stopped"]) == (200, False, True)
    assert stopped["fault"] == "stopped; settings rolled back"
    assert (await world.snapshot()).knobs.max_num_seqs == 64
    assert (await world.send("POST", f"{BASE}/stop", {"run_id": run["run_id"]}))[0] == 404


async def test_a_stopped_run_that_had_changed_nothing_doesnt_say_that_it_rolled_back(world: Any) -> None:
    run = await started(world, yaml="name: idle\nsteps:\n  - wait: 1h\n")
    _, stopped = await world.send("POST", f"{BASE}/stop", {"run_id": run["run_id"]})
    assert stopped["fault"] == "stopped; settings unchanged"


async def test_a_run_whose_knob_somebody_has_turned_tells_of_the_conflict_however_it_ends(world: Any) -> None:
    run = await started(world, yaml=LONG)
    await world.until(lambda snapshot: snapshot.knobs.max_num_seqs == 3)
    await world.send("PATCH", "/control/v1/knobs", {"changes": {"max_num_seqs": 5}})
    await world.send("POST", f"{BASE}/stop", {"run_id": run["run_id"]})  # unless it has noticed by itself
    run = await ended(world, run)
    told = [run["fault"], *(report["settings"] for report in run["reports"])]
    assert any("conflict" in text for text in told), told
    assert (await world.snapshot()).knobs.max_num_seqs == 5


async def test_a_gateway_that_ends_takes_the_changes_of_its_runs_back(world: Any) -> None:
    await started(world, yaml=LONG)
    await world.until(lambda snapshot: snapshot.knobs.max_num_seqs == 3)
    await world.gateway.shutdown()
    assert (await world.snapshot()).knobs.max_num_seqs == 64


async def test_results_are_counted_by_result_and_settings_and_never_by_a_clients_words(world: Any) -> None:
    await ended(world, await started(world, yaml=SHORT))
    await ended(world, await started(world, yaml=FAILING.replace("mine", "someone-elses-name")))
    counted = {name: n for name, n in (await world.metrics()).items() if "playbook_results_total" in name}
    assert counted == {
        'schedtop_playbook_results_total{playbook="other",result="pass",settings="kept"}': 1.0,
        'schedtop_playbook_results_total{playbook="other",result="fail",settings="unchanged"}': 1.0,
    }


async def test_shipped_playbooks_and_those_of_the_operators_folder_are_listed_and_started_by_name(
    start_world: Any, tmp_path: Path
) -> None:
    (tmp_path / "mine.yaml").write_text(SHORT)
    (tmp_path / "broken.yaml").write_text("name: [")
    world = await start_world(gateway={"playbooks": tmp_path})
    _, listed = await world.send("GET", BASE)
    by_name = {one["name"]: one for one in listed["playbooks"]}
    assert by_name["protect-itl"]["is_shipped"] and by_name["protect-itl"]["description"]
    assert not by_name["mine"]["is_shipped"] and by_name["broken"]["fault"]
    run = await ended(world, await started(world, name="mine"))
    assert run["reports"][0]["settings"] == "kept"


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "mine.yaml", "pyproject.toml", "protect-itl.yaml"])
async def test_a_path_from_a_client_is_never_opened(world: Any, name: str) -> None:
    status, refusal = await world.send("POST", f"{BASE}/start", {"name": name})
    assert status == 400 and "no playbook is called" in refusal["error"]["message"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "either name or yaml"),
        ({"name": "protect-itl", "yaml": SHORT}, "either name or yaml"),
        ({"yaml": "name: x\nsteps:\n  - wat: 1s"}, "yaml:3:5: unknown field 'wat'"),
        ({"yaml": "a: &a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b]\n" + "d: [" + "*c, " * 2000 + "]"}, "aliases counted"),
        ({"yaml": "[" * 5000}, "yaml:1:"),
        ({"yaml": SHORT, "dry": True}, "dry"),
    ],
)
async def test_a_body_that_makes_no_sense_is_told_why(world: Any, body: dict[str, Any], words: str) -> None:
    status, refusal = await world.send("POST", f"{BASE}/start", body)
    assert status == 400 and words in refusal["error"]["message"]


async def test_reading_is_no_right_to_start_or_stop(world: Any) -> None:
    for method, path, body, reader, batch in (
        ("GET", BASE, None, 200, 403),
        ("GET", f"{BASE}/runs", None, 200, 403),
        ("POST", f"{BASE}/start", {"yaml": SHORT}, 403, 403),
        ("POST", f"{BASE}/stop", {"run_id": 1}, 403, 403),
    ):
        assert (await world.send(method, path, body, token="reader"))[0] == reader
        assert (await world.send(method, path, body, token="batch"))[0] == batch
        assert (await world.send(method, path, body, token=None))[0] == 401
