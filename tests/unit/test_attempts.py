"""``pycollective run --restarts`` without MPI: a shell script is the launcher, and says which hosts answer."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import NoReturn

import pytest

from pycollective.launch.job import Job
from pycollective.run import leftovers
from pycollective.run.restarts import fit_to_hosts

# Each line of the file of statuses is for one attempt. A host is down if there is a file of its name.
LAUNCHER = """
import sys
from pathlib import Path
from pycollective.launch.job import Job
from pycollective.run.restarts import Start, run
from pycollective.run.supervise import FaultPatterns

where, restarts, least = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
text = FaultPatterns("lost a host", "never said") if sys.argv[4] == "hides" else None
script = '''
if [ "$3" = sleep ]; then test ! -e "$1/$2"; exit; fi
echo "attempt $PYCOLLECTIVE_RESTART: $2"
status=$(sed -n "$((PYCOLLECTIVE_RESTART + 1))p" "$1/statuses")
case $status in *down) touch "$1/b"; status=${status%down} ;; esac
case $status in *said) echo "the launcher has lost a host." >&2; status=${status%said} ;; esac
exit "$status"
'''


def line(job):
    shares = ",".join(f"{name}:{number}" for name, number in job.shares())
    hosts = job.hosts[0][0] if job.command[0] == "sleep" else shares
    return ["sh", "-c", script, "launcher", str(where), hosts, *job.command]


job = Job(4, ["program"], [("a", None), ("b", None)])
sys.exit(run(Start(job, line, {}, job.capacity(), text), restarts, least, {"PATH": "/usr/bin:/bin"}))
"""


def started(where: Path, statuses: str, restarts: int, least: int, hides: str = "") -> tuple[int, list[str], list[str]]:
    """The status of a run, the attempts that its launcher has seen, and what it has said."""
    (where / "statuses").write_text("\n".join(statuses.split()))
    command = [sys.executable, "-c", LAUNCHER, str(where), str(restarts), str(least), hides]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout.splitlines(), done.stderr.splitlines()


def test_a_job_that_succeeds(tmp_path: Path) -> None:
    assert started(tmp_path, "0", 2, 4) == (0, ["attempt 0: a:2,b:2"], [])


def test_a_fault_and_a_success(tmp_path: Path) -> None:
    status, attempts, said = started(tmp_path, "137 0", 2, 4)
    assert (status, attempts) == (0, ["attempt 0: a:2,b:2", "attempt 1: a:2,b:2"])
    assert len(said) == 1
    assert said[0].startswith("pycollective: attempt 1 of 3 ended with status 137 (SIGKILL) after ")
    assert said[0].endswith(" s. Starting again with 4 ranks.")


def test_the_status_of_the_last_attempt(tmp_path: Path) -> None:
    status, attempts, said = started(tmp_path, "9 8 7 0", 2, 4)
    assert (status, len(attempts)) == (7, 3)
    assert said[-1].endswith("Not starting again: --restarts 2 are used up.")


@pytest.mark.parametrize(("status", "why"), [(2, "called wrongly"), (126, "may not be run"), (127, "no such program")])
def test_what_another_attempt_would_not_mend(status: int, why: str, tmp_path: Path) -> None:
    got, attempts, said = started(tmp_path, str(status), 2, 4)
    assert (got, len(attempts), len(said)) == (status, 1, 1)
    assert f"Not starting again: by status {status} " in said[0]
    assert why in said[0]


def test_a_host_that_is_gone(tmp_path: Path) -> None:
    status, attempts, said = started(tmp_path, "9down 0", 2, 2)
    assert (status, attempts) == (0, ["attempt 0: a:2,b:2", "attempt 1: a:2"])
    assert said[0].endswith(" s, and b no longer answers. Starting again with 2 ranks on a.")


def test_too_few_ranks(tmp_path: Path) -> None:
    status, attempts, said = started(tmp_path, "9down 0", 2, 3)
    assert (status, len(attempts)) == (9, 1)
    assert said[0].endswith("Not starting again: the hosts that remain can take 2 ranks, and --min-ranks is 3.")


def test_a_launcher_that_hides_the_loss_of_a_host(tmp_path: Path) -> None:
    status, attempts, said = started(tmp_path, "0saiddown 0", 2, 2, "hides")
    assert (status, attempts) == (0, ["attempt 0: a:2,b:2", "attempt 1: a:2"])
    assert said[0] == "the launcher has lost a host."
    assert "ended with status 1 after" in said[1]
    (tmp_path / "b").unlink()
    assert started(tmp_path, "0saiddown", 0, 2, "hides")[0] == 1
    assert started(tmp_path, "7said", 0, 2, "hides")[0] == 7


def test_a_success_is_believed_whether_or_not_the_hosts_answer(tmp_path: Path) -> None:
    assert started(tmp_path, "0down", 2, 2, "hides") == (0, ["attempt 0: a:2,b:2"], [])


def test_spare_hosts_and_hosts_that_are_back() -> None:
    job = Job(4, (), [("a", 4), ("b", 4), ("c", 4)])
    assert fit_to_hosts(job, job.capacity(), ["a"]).shares() == [("b", 2), ("c", 2)]
    assert fit_to_hosts(job, job.capacity(), ["a", "b"]).shares() == [("c", 4)]
    assert fit_to_hosts(job, job.capacity(), []) is job
    assert fit_to_hosts(job, job.capacity(), ["a", "b", "c"]).ranks == 0
    named = Job(3, (), hostfile="my.hosts")
    assert fit_to_hosts(named, {"a": 2, "b": 1}, ["b"]) == Job(2, (), [("a", 2)])


# This process leaves a child in a session of its own, and is its reaper.
ORPHAN = """
import subprocess, sys
from pycollective.run import supervise

supervise._GRACE_S = 0.2
supervisor = supervise.Supervisor()
child = "sleep 1000 & echo $!"
ended = supervisor.run(["sh", "-c", f"setsid sh -c '{child}'; exit 3"], {"PATH": "/usr/bin:/bin"})
supervise.end_children()
sys.stdout.write(f"{ended.status} {ended.stopped}\\n")
"""


def test_what_a_launcher_leaves_running_is_ended() -> None:
    done = subprocess.run([sys.executable, "-c", ORPHAN], capture_output=True, text=True, timeout=60, check=True)
    pid, how = done.stdout.splitlines()
    assert how == "3 False"
    assert not Path(f"/proc/{pid}").exists()


def test_signals_go_to_the_launcher() -> None:
    # The launcher gets a checkpoint's signal and lives on, then the signal that ends the job.
    program = textwrap.dedent(
        """
        import os, sys
        from pycollective.run import supervise

        traps = 'trap "echo saved" USR1; trap "echo ended; exit 4" TERM; '
        script = traps + "kill -USR1 $PPID; sleep 1; kill $PPID; sleep 9"
        ended = supervise.Supervisor().run(["bash", "-c", script], {"PATH": "/usr/bin:/bin"})
        supervise.end_children()
        sys.stdout.write(f"{ended.status} {ended.stopped}\\n")
        """
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["saved", "ended", "4", "True"]


def test_shared_memory_of_a_dead_job(tmp_path: Path) -> None:
    shm = tmp_path / "shm"
    shm.mkdir()
    (shm / "mpich_shm_1_0").touch()
    before = leftovers.shared_memory_files(shm)
    for name in ("mpich_shm_2_0", "mpich_shm_3_0", "sm_segment.h.0.1.0", "sem.of-a-program"):
        (shm / name).touch()
    with (shm / "mpich_shm_3_0").open():  # another job's, which runs
        removed = leftovers.remove_shared_memory_files(before, shm)
    assert [path.name for path in removed] == ["mpich_shm_2_0", "sm_segment.h.0.1.0"]
    assert sorted(path.name for path in shm.iterdir()) == ["mpich_shm_1_0", "mpich_shm_3_0", "sem.of-a-program"]


def test_session_of_a_dead_launcher(tmp_path: Path) -> None:
    for name in ("ompi.41/0", "ompi.412", "ompi.host.41"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "ompi.41" / "pmix.h.tool").touch()
    leftovers.remove_session(41, tmp_path)
    leftovers.remove_session(42, tmp_path)  # it has left nothing
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ompi.412", "ompi.host.41"]


def test_processes_that_hide_what_they_use_keep_all_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proc, shm = tmp_path / "proc", tmp_path / "shm"
    (proc / "7" / "fd").mkdir(parents=True)
    (proc / "7" / "maps").write_text(f"7f00-7f10 rw-s 00000000 00:1b 5 {shm / 'mpich_shm_2_0'}\n7f20-7f30 rw-p 0 0 0\n")
    shm.mkdir()
    for name in ("mpich_shm_2_0", "mpich_shm_3_0"):
        (shm / name).touch()
    assert leftovers.remove_shared_memory_files(set(), shm, proc) == [shm / "mpich_shm_3_0"]
    (shm / "mpich_shm_3_0").touch()

    def refuse(_: Path) -> NoReturn:
        raise PermissionError

    monkeypatch.setattr(Path, "iterdir", refuse)
    assert leftovers.remove_shared_memory_files(set(), shm, proc) == []
