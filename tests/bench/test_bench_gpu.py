"""`python -m bench gpu`: steps in processes of their own, within their time, kept and resumed."""

from __future__ import annotations

import json
import signal
import tarfile
from pathlib import Path

import pytest
import torch
from stepping import SLEEPER, python
from support import HANGS

from bench import __main__ as command
from bench import gpu, jobs, processes
from bench.env import settled
from bench.gpu import Step
from bench.settings import PARTS, filled, parsers

pytestmark = pytest.mark.usefixtures("hang_guard")
CPU = ["gpu", "--allow-cpu", "--tiny", "--minutes=9"]


@pytest.fixture
def steps(monkeypatch):
    made: list[Step] = []
    monkeypatch.setattr(gpu, "steps_of", lambda *chosen: made)
    return made


def outcomes(out) -> dict[str, str]:
    record = json.loads((out / "gpu.json").read_text())
    return {name: facts["outcome"] for name, facts in record["steps"].items()}


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without GPU")
def test_without_a_gpu_it_says_so(capsys):
    with pytest.raises(SystemExit) as ended:
        command.main(["gpu"])
    assert ended.value.code == 2
    assert "this torch sees no GPU; --allow-cpu" in capsys.readouterr().err


def test_a_failure_costs_its_own_step_alone(tmp_path, capsys, steps):
    steps += [
        Step(1, "bad", python("raise SystemExit('no [luck]')")),
        Step(1, "good", python("print(7)")),
    ]
    assert command.main([*CPU, f"--out={tmp_path}"]) == 1
    assert outcomes(tmp_path) == {"bad": "failed", "good": "ok"}
    assert (tmp_path / "good.log").read_text() == "7\n"
    out = capsys.readouterr().out
    assert "    no [luck]" in out
    assert "failed: bad" in out


def test_another_call_goes_on_where_one_stopped(tmp_path, steps, capsys, monkeypatch):
    mark = f"open({str(tmp_path / 'mark')!r}, 'a').write('x')"
    steps += [Step(1, "once", python(mark))]
    assert command.main([*CPU, f"--out={tmp_path}"]) == 0
    # in another copy of the checkout, whose only trace is the folder
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    assert command.main([*CPU, f"--out={tmp_path}"]) == 0
    assert (tmp_path / "mark").read_text() == "x"
    assert "once: ok, in an earlier call" in capsys.readouterr().out
    assert command.main([*CPU, "--restart", f"--out={tmp_path}"]) == 0
    assert (tmp_path / "mark").read_text() == "xx"
    # another commit's steps are to be taken
    monkeypatch.setenv("FUSEDCKPT_COMMIT", "another")
    assert command.main([*CPU, f"--out={tmp_path}"]) == 0
    assert (tmp_path / "mark").read_text() == "xxx"


def test_a_part_takes_its_steps_and_keeps_those_of_others(tmp_path, steps, capsys):
    mark = tmp_path / "mark"
    steps += [Step(n, f"step{n}", python(f"open({str(mark)!r}, 'a').write('{n}')")) for n in PARTS]
    assert command.main([*CPU, "--part=2", f"--out={tmp_path}"]) == 0
    assert outcomes(tmp_path) == {"step1": "not started", "step2": "ok", "step3": "not started"}
    assert command.main([*CPU, "--part=1", f"--out={tmp_path}"]) == 0
    assert command.main([*CPU, f"--out={tmp_path}"]) == 0
    assert mark.read_text() == "213"
    assert set(outcomes(tmp_path).values()) == {"ok"}


def packed(archive: Path) -> dict[str, str]:
    with tarfile.open(archive) as file:
        files = ((member.name, file.extractfile(member)) for member in file)
        return {name: part.read().decode() for name, part in files if part is not None}


def test_one_archive_has_it_all(tmp_path, steps):
    out, archive = tmp_path / "out", tmp_path / "elsewhere" / "all.tar.gz"
    steps += [Step(1, "first", python(f"open({str(out / 'run.jsonl')!r}, 'w').write('row')"))]
    # after every step: what a later one does to this process takes nothing away
    look = f"import tarfile; print(tarfile.open({str(archive)!r}).getnames())"
    steps += [Step(1, "second", python(look)), Step(1, "bad", python("raise SystemExit('no')"))]
    assert command.main([*CPU, f"--out={out}", f"--archive={archive}"]) == 1
    found = packed(archive)
    assert set(found) == {"gpu.json", "run.jsonl", "first.log", "second.log", "bad.log"}
    assert (found["run.jsonl"], found["bad.log"]) == ("row", "no\n")
    assert found["second.log"] == "['first.log', 'gpu.json', 'run.jsonl']\n"
    # by default beside the folder; inside it, an archive does not hold itself
    assert command.main([*CPU, f"--out={out}"]) == 1
    assert command.main([*CPU, f"--out={out}", f"--archive={out / 'all.tgz'}"]) == 1
    assert set(packed(out / "all.tgz")) == set(packed(tmp_path / "out.tar.gz")) == set(found)


def to_parent(number: str) -> str:
    return f"os.kill(os.getppid(), signal.{number})"


@pytest.mark.parametrize("name", ["SIGINT", "SIGHUP"])
def test_who_is_asked_to_stop_ends_the_step_first(
    tmp_path, monkeypatch, capsys, steps, outer, name
):
    monkeypatch.setattr(processes, "GRACE", HANGS)
    code = SLEEPER.replace("time.sleep", f"import os, signal; {to_parent(name)}; time.sleep")
    steps += [
        Step(1, "slow", python(code)),
        Step(1, "next", python("")),
        Step(1, "plot", python("")),
    ]
    assert command.main([*CPU, f"--out={tmp_path}"]) == 130
    left = dict.fromkeys(("next", "plot"), "not started")
    assert outcomes(tmp_path) == {"slow": "interrupted"} | left
    assert packed(tmp_path.with_name(f"{tmp_path.name}.tar.gz"))["slow.log"] == "half\nkept\n"
    assert (tmp_path / "slow.log").read_text() == "half\nkept\n"
    assert "left: slow, next, plot; another call goes on there" in capsys.readouterr().out
    # whoever called gets its own handler back
    assert signal.getsignal(getattr(signal, name)) is outer


def test_a_second_interrupt_kills_at_once(tmp_path, monkeypatch, steps, outer):
    # longer than the guard lets the test take
    monkeypatch.setattr(processes, "GRACE", 2 * HANGS)
    again = f"signal.signal(signal.SIGINT, lambda *_: {to_parent('SIGINT')})"
    code = f"import os, signal, time; {again}; {to_parent('SIGINT')}; time.sleep(3600)"
    steps += [Step(1, "deaf", python(code))]
    assert command.main([*CPU, f"--out={tmp_path}"]) == 130
    facts = json.loads((tmp_path / "gpu.json").read_text())["steps"]["deaf"]
    assert (facts["outcome"], facts["status"]) == ("interrupted", -9)


def test_who_a_signal_killed_is_tried_again(tmp_path, capsys, steps):
    mark = tmp_path / "mark"
    code = f"""
import os, pathlib, signal
mark = pathlib.Path({str(mark)!r})
if not mark.exists():
    mark.touch()
    os.kill(os.getpid(), signal.SIGKILL)
"""
    steps += [Step(1, "unlucky", python(code))]
    assert command.main([*CPU, f"--out={tmp_path}"]) == 1
    assert outcomes(tmp_path) == {"unlucky": "killed"}
    out = capsys.readouterr().out
    assert "unlucky: killed with status -9 after" in out
    assert "left: unlucky;" in out
    assert command.main([*CPU, f"--out={tmp_path}"]) == 0
    assert outcomes(tmp_path) == {"unlucky": "ok"}


def test_a_restart_measures_again_and_keeps_what_was(tmp_path, steps):
    (tmp_path / "launched").mkdir()
    for name in ("run.jsonl", "launched/run.jsonl", "mine.txt"):
        (tmp_path / name).write_text("old")
    steps += [Step(1, "cases", python(f"open({str(tmp_path / 'run.jsonl')!r}, 'x').write('new')"))]
    for number in (1, 2):
        assert command.main([*CPU, "--restart", f"--out={tmp_path}"]) == 0
        assert outcomes(tmp_path) == {"cases": "ok"}
        assert (tmp_path / "run.jsonl").read_text() == "new"
        assert (tmp_path / f"before-{number}" / "run.jsonl").exists()
    first = tmp_path / "before-1"
    assert {str(path.relative_to(first)) for path in first.rglob("*")} == {
        *("run.jsonl", "launched", "launched/run.jsonl"),
    }
    assert (tmp_path / "mine.txt").exists()


def prepared(*options: str):
    return gpu.prepare(settled(vars(parsers()[1]["gpu"].parse_args(["--allow-cpu", *options]))))


def test_a_folder_is_meant_from_where_the_command_is_called(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    chosen = prepared("--out=here", "--tiny")
    assert chosen.out == tmp_path / "here"
    steps = gpu.steps_of(chosen.out, True)
    assert any(str(tmp_path / "here") in word for s in steps for word in s.command)


@pytest.mark.parametrize(
    "record",
    [
        "{",
        '{"key": KEY}',
        '{"key": KEY, "steps": {"env": 5}}',
        '{"key": KEY, "steps": {"old": {"status": 1}}}',
        '{"key": KEY, "steps": {"env": {"outcome": ["ok"]}}}',
    ],
)
def test_a_damaged_record_is_set_aside_aloud(tmp_path, steps, record):
    steps += [Step(1, "env", python(""))]
    assert command.main([*CPU, f"--out={tmp_path}"]) == 0
    path = tmp_path / "gpu.json"
    text = record.replace("KEY", json.dumps(json.loads(path.read_text())["key"]))
    path.write_text(text)
    with pytest.warns(RuntimeWarning, match=r"gpu\.json is no record .*moved to gpu\.json\.damag"):
        assert command.main([*CPU, f"--out={tmp_path}"]) == 0
    assert outcomes(tmp_path) == {"env": "ok"}
    assert (tmp_path / "gpu.json.damaged").read_text() == text


def test_time_that_is_too_short_leaves_steps(tmp_path, capsys, steps):
    steps += [Step(1, "once", python(""))]
    short = ["gpu", "--allow-cpu", "--minutes=0.01", f"--out={tmp_path}"]
    assert command.main(short) == 1
    assert outcomes(tmp_path) == {"once": "not started"}
    assert "left: once;" in capsys.readouterr().out
    assert command.main([*CPU, f"--out={tmp_path}"]) == 0
    assert command.main(short) == 0


def test_steps_share_the_time():
    step, last = Step(1, "half", (), 0.5), processes.GRACE
    assert gpu._limit(step, 400.0 + last) == 200.0
    # a process needs as long to start
    assert gpu._limit(step, 40.0 + last) == 30.0
    assert gpu._limit(step, 20.0 + last) == 20.0
    assert gpu._limit(step, 0.0 + last) is None


@pytest.mark.parametrize("minutes", [0.1, 9.0])
def test_what_takes_all_it_may_ends_in_time(tmp_path, monkeypatch, minutes):
    """Each step as long as its limit, and then the grace."""
    now = [0.0]

    def slowly(command, log, seconds, stops):
        now[0] += seconds + processes.GRACE
        log.touch()
        return "out of time", -9

    monkeypatch.setattr(gpu, "take", slowly)
    monkeypatch.setattr(gpu.time, "monotonic", lambda: now[0])
    for part in PARTS:
        chosen = prepared(f"--minutes={minutes}", f"--out={tmp_path}", f"--part={part}")
        chosen.tiny, now[0] = False, 0.0
        assert gpu.run(chosen) == 1
        assert now[0] <= 60 * minutes


@pytest.mark.parametrize(("has_xdist", "cores"), [(True, 16), (True, 1), (False, 16)])
def test_tests_share_the_gpu_where_they_can(tmp_path, monkeypatch, has_xdist, cores):
    found = object() if has_xdist else None
    monkeypatch.setattr(gpu, "find_spec", lambda name: found)
    monkeypatch.setattr(gpu.os, "cpu_count", lambda: cores)
    steps = gpu.steps_of(tmp_path, False)
    commands = [" ".join(step.command) for step in steps if "pytest" in step.command]
    assert len(commands) == 2
    for words in commands:
        assert ("-n 14 --dist=loadgroup" in words) == (has_xdist and cores > 1)


@pytest.mark.parametrize("tiny", [False, True])
def test_the_steps_of_a_gpu_are_commands_that_exist(tmp_path, monkeypatch, tiny):
    seen = []
    monkeypatch.setattr(command, "_run", lambda parser, args: seen.append(args) or 0)
    monkeypatch.setattr(gpu.shutil, "which", lambda name: name)
    steps = gpu.steps_of(tmp_path, tiny)
    assert {step.part for step in steps} == set(PARTS)
    for step in sorted(steps, key=lambda step: step.part):
        if "bench" in step.command:
            assert command.main(step.command[step.command.index("bench") + 1 :]) == 0
    names = ["env", "run", "run", "profile", "profile", *["run"] * 5, "capacity"]
    toys = ["env", "run", "profile", "run", "capacity"]
    assert [args.command for args in seen] == (toys if tiny else names)
    assert all((gpu.ROOT / "tests" / name).exists() for name in gpu.KERNEL_TESTS)
    for args in seen:
        if args.command in ("run", "capacity", "profile"):
            jobs.check_choice(filled(vars(args), "cuda"))
    compiled = [args for args in seen if args.command == "run" and "compile" not in args.skip]
    # compilers take part at the end
    assert compiled == ([] if tiny else seen[-3:-2])


def test_a_cpu_goes_through_the_same_steps(tmp_path, monkeypatch, capsys):
    # .ci/run goes through all of them
    monkeypatch.setenv("FUSEDCKPT_COMMIT", "0123")
    # interpreted kernels would take longer
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    first = next(step for step in gpu.steps_of(tmp_path, True) if step.name == "numbers")
    monkeypatch.setattr(gpu, "steps_of", lambda *_: [first])
    assert command.main([*CPU, f"--out={tmp_path}"]) == 0, capsys.readouterr().out
    assert outcomes(tmp_path) == {"numbers": "ok"}
    assert "rms_norm, tiny: 48 tokens" in (tmp_path / "numbers.log").read_text()
