"""How a check is asked for, and what its report looks like."""

import builtins
import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import gymnasium
import pytest

import agentrl
from agentrl.cli import main
from agentrl.errors import ConfigError, InfrastructureError, UnknownNameError
from agentrl.toolenv.checker import CHECKS, CODES, Finding, Report, check_env

from . import broken_contract as contract
from . import broken_rewards
from . import broken_tasks as tasks
from .conftest import Register
from .good import Good


def test_a_report_reads_as_lines() -> None:
    report = Report(findings=(Finding(code="ARL-E003", message="Gold lost."),), skipped=("the rest.",))
    assert str(report) == f"ARL-E003  Gold lost. {CODES['ARL-E003'].advice}\nnot checked: the rest."
    assert json.loads(json.dumps(report.row())) == {
        "ok": False,
        "findings": [{"code": "ARL-E003", "message": "Gold lost.", "advice": CODES["ARL-E003"].advice}],
        "skipped": ["the rest."],
    }


def test_codes_are_sentences_and_keep_their_numbers() -> None:
    assert all(code.meaning and code.advice[0].isupper() and code.advice.endswith(".") for code in CODES.values())
    kinds = {"E": range(25), "S": range(1, 7), "R": range(1, 8), "P": range(1, 6), "T": (1, 4, 5)}
    assert [*CODES] == [f"ARL-{kind}{number:03}" for kind, numbers in kinds.items() for number in numbers]


def test_a_given_instance_is_checked_as_well(register: Register) -> None:
    env = agentrl.make(register(contract.Shares))
    assert {finding.code for finding in check_env(env).findings} == {"ARL-E008"}
    assert check_env(contract.Shares()).ok  # no second instance to compare with: said in Report.skipped


def test_an_infrastructure_fault_is_no_finding() -> None:
    env = Good()
    env.tools[0].call = Mock(side_effect=InfrastructureError("the daemon is gone"))
    with pytest.raises(InfrastructureError, match="daemon"):
        check_env(env)


def test_the_same_finding_is_reported_once_and_many_of_one_kind_are_counted(register: Register) -> None:
    same = check_env(broken_rewards.ScoresAlways(), tasks=3).findings
    assert len(same) == len(set(same))
    findings = check_env(register(contract.ErrorsEnd)).findings
    assert [finding.code for finding in findings] == ["ARL-E004"] * 3
    assert findings[-1].message.endswith(" more like it.)")


def test_wrong_arguments_are_refused(register: Register) -> None:
    with pytest.raises(ConfigError, match="tasks is 0"):
        check_env(Good(), tasks=0)
    with pytest.raises(UnknownNameError, match="dialect"):
        check_env(register(Good), dialect="morse")
    with pytest.raises(ConfigError, match="arguments already"):
        check_env(Good(), dialect="fence")


def test_every_check_is_announced(register: Register) -> None:
    lines: list[str] = []
    check_env(register(Good), dialect="fence", say=lines.append)
    assert len(lines) == len(set(lines)) == len(CHECKS) > 15
    assert {"first observation", "turns", "leaks", "tokenizer"} <= set(lines)


class NoReward(Good):
    reward = agentrl.ToolEnv.reward


class Twins(Good):
    def tasks(self, split: str) -> agentrl.TaskList:
        return agentrl.TaskList([agentrl.Task(id="q1", prompt="1?")] * 2)


@pytest.mark.parametrize(
    ("kind", "code", "message"),
    [
        (NoReward, "ARL-E005", "NoReward.reward is not written: let it return parts, as in {'correct': 1.0}."),
        (Twins, "ARL-E000", "Two tasks of one set share the id 'q1': give each its own."),
    ],
)
def test_an_error_that_says_what_to_do_is_one_finding(
    register: Register, short_texts: None, kind: type[Good], code: str, message: str
) -> None:
    findings = [finding for finding in check_env(register(kind)).findings if finding.method]
    assert [finding.code for finding in findings if finding.code == code] == [code]
    line = str(Report(findings=tuple(findings)))
    assert line.startswith(f"{code}  {message}") and "EnvContractError" not in line and CODES[code].advice not in line


def test_a_tool_that_takes_all_its_time_takes_no_more(register: Register) -> None:
    lines: list[str] = []
    report = check_env(register(tasks.OffersSlowness), say=lines.append)
    assert lines[-1] == "tools work" and "turns" not in lines
    assert report.skipped == ("all other checks: each call would take the tool's whole time.",)


def test_a_long_check_tells_how_far_it_is(
    register: Register, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    env_id = register(Good)
    assert main(["check-env", env_id]) == 0 and capsys.readouterr().err == ""
    monkeypatch.setattr("agentrl.runs.progress.Bar._EVERY_S", -1.0)
    assert main(["check-env", env_id]) == 0
    lines, total = capsys.readouterr().err.splitlines(), len(CHECKS)
    assert lines[0].startswith(f"checking 1/{total}: tasks, about ")
    assert lines[-1].startswith(f"checking {total}/{total}: tokenizer, about ")


@pytest.mark.parametrize("command", ["check-env", "play", "list"])
@pytest.mark.parametrize(
    ("point", "why"),
    [
        ("tests.toolenv.checker.good:NoSuchClass", "has no attribute 'NoSuchClass'"),
        ("tests.toolenv.checker.good", "not enough values"),
        ("tests.toolenv.checker.no_such_module:Good", "No module named 'tests.toolenv.checker.no_such_module'"),
    ],
)
def test_a_class_that_is_not_there_is_one_sentence(
    register: Register, command: str, point: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    env_id = register(Good)
    gymnasium.registry[env_id].entry_point = point
    assert main([command, env_id]) == 2
    error = capsys.readouterr().err
    assert error.startswith("agentrl: environment 'test/Checked0-v0'") and why in error and len(error.splitlines()) == 1


def test_a_class_in_place_of_an_id_is_told_the_ids_of_its_module(
    register: Register, capsys: pytest.CaptureFixture[str]
) -> None:
    register(Good)
    assert main(["check-env", "tests.toolenv.checker.good:NoSuchClass"]) == 2
    error = capsys.readouterr().err
    assert "tests.toolenv.checker.good:test/Checked0-v0" in error and "agentrl/" not in error


def test_what_a_probe_changes_is_restored(register: Register) -> None:
    before = dict(vars(builtins))
    assert not check_env(register(broken_rewards.RunsBesideTheGrader)).ok
    assert vars(builtins) == before


@pytest.mark.slow
def test_the_command_says_what_was_seen_and_what_to_do(
    register: Register, tokenizer: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken, good = register(contract.GoldWrong), register(Good)
    assert main(["check-env", broken]) == 1
    assert all(line.startswith("ARL-E003  Gold scored 0 of 1") for line in capsys.readouterr().out.splitlines())
    assert main(["check-env", broken, "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert [sorted(finding) for finding in report["findings"]] == [["advice", "code", "message"]] * 3
    tokenizer.save_pretrained(tmp_path)
    assert main(["check-env", good, "--tokenizer", str(tmp_path), "--dialect", "fence", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"ok": True, "findings": [], "skipped": []}
    assert main(["check-env", good, "--tokenizer", str(tmp_path / "none")]) == 2
    assert "no tokenizer can be loaded from" in capsys.readouterr().err
