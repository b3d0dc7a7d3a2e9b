"""Comparisons between the leaders of 64 to 10,240 hosts, in SimGrid's simulation of three networks.

    python -m benchmarks.scale 64 256 1024

It needs SimGrid (Debian: ``apt-get install --no-install-recommends libsimgrid-dev``). ``leaders.cc`` says what runs.
The times are simulated: they do not depend on this machine. 10240 hosts take minutes.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from jax.ffi import include_dir

ROOT = Path(__file__).parents[2]
NATIVE = ROOT / "native"
SOURCES = [
    NATIVE / "calls" / "comparison.cc",
    NATIVE / "base" / "futex.cc",
    *(path for room in ("mpi", "records", "shared_memory") for path in sorted((NATIVE / room).glob("*.cc"))),
    Path(__file__).with_name("leaders.cc"),
]

DRAGONFLY = {64: "4,3;2,3;4,1;2", 256: "4,3;4,3;4,1;4", 1024: "8,3;4,3;8,1;4", 10240: "20,3;8,3;16,1;4"}
"""Groups, chassis, routers and hosts, with the links of each level."""

MOST_GATHERED = 1024
"""Above this number of leaders an allgather is not simulated. There MPICH takes a ring, which has n^2 messages."""


def networks(size: int) -> dict[str, str]:
    """The attributes of SimGrid's cluster of so many hosts, by the names of networks."""
    infiniband = 'bw="12.5GBps" lat="300ns"'
    return {
        "Ethernet 25 Gbit/s": 'bw="3.125GBps" lat="5us" bb_bw="10TBps" bb_lat="1us"',
        "InfiniBand, fat tree": f'{infiniband} topology="FAT_TREE" topo_parameters="2;32,{size // 32};1,16;1,1"',
        "dragonfly": f'{infiniband} topology="DRAGONFLY" topo_parameters="{DRAGONFLY[size]}"',
    }


def compiled(folder: Path) -> Path:
    """The program, in a folder."""
    flags = ["-std=c++17", "-O1", "-fPIC", "-pthread", "-isystem", include_dir(), "-I", str(NATIVE)]

    def compile_one(source: Path) -> str:
        out = folder / f"{source.stem}.o"
        subprocess.run(["smpicxx", *flags, "-c", str(source), "-o", str(out)], check=True)
        return str(out)

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compile_one, SOURCES))
    program = folder / "leaders"
    subprocess.run(["smpicxx", *flags, *objects, "-o", str(program)], check=True)
    return program


def simulated_us(program: Path, size: int, cluster: str) -> list[float]:
    """The microseconds of the calls of ``leaders.cc``; 0 for one that was not made."""
    platform = program.with_name("platform.xml")
    platform.write_text(
        '<?xml version="1.0"?>\n<!DOCTYPE platform SYSTEM "https://simgrid.org/simgrid.dtd">\n'
        '<platform version="4.1">\n'
        f'<cluster id="c" prefix="h" suffix="" radical="0-{size - 1}" speed="1Gf" {cluster}/>\n</platform>\n'
    )
    # One address space, since the program has no state of a rank outside of it; no time for what a rank computes.
    options = ["privatization:no", "simulate-computation:no", "coll-selector:mpich"]
    # MPICH's algorithm for 16 bytes. The selector finds the same one, but makes communicators before it, in n^2 steps.
    options += ["allreduce:rdb"]
    command = ["smpirun", "-np", str(size), "-platform", str(platform), *(f"--cfg=smpi/{option}" for option in options)]
    command += ["--cfg=contexts/stack-size:256", "--log=root.thres:error", str(program)]
    command += ["flat"] if size <= MOST_GATHERED else []
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    agree, *seconds = done.stdout.split()
    assert agree == "1", done.stdout
    return [1e6 * float(number) for number in seconds]


def main() -> None:
    parser = argparse.ArgumentParser(description="Simulates comparisons between the leaders of many hosts.")
    parser.add_argument("sizes", type=int, nargs="+", choices=[*DRAGONFLY], help="numbers of hosts")
    sizes = parser.parse_args().sizes
    print("| us for a call | hosts | comparison | allreduce of 16 B | allgather of 128 B |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        program = compiled(Path(folder))
        for size in sizes:
            for name, cluster in networks(size).items():
                compared, gathered, reduced = simulated_us(program, size, cluster)
                last = f"{gathered:.1f}" if gathered else ""
                print(f"| {name} | {size:,} | {compared:.1f} | {reduced:.1f} | {last} |", flush=True)


if __name__ == "__main__":
    main()
