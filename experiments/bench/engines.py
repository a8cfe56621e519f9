"""What running units costs on each engine: units per minute, and the time per unit that is not the unit's own work.

    python experiments/bench/engines.py [--units 12] [--seconds 2]

A unit multiplies matrices in one thread; how many products make about `--seconds` is measured once, and every row does the
same number. Work is measured inside the unit, so a slow or shared core shows there and not as overhead:

    overhead per unit         = (wall time − the sum of the units' own seconds / workers) / units
    worker time lost per unit = that × workers

which contain starting the processes (imports of torch among them), sending, writing files, and the last worker's waiting.
For Ray it leaves out starting the cluster, which is shown apart: a cluster of 1 or 2 nodes with one CPU each on this machine.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from interp import record
from interp.engines import run_units

RESULTS = Path(__file__).parent / "results" / "engines"
SIZE = 512
ROWS: list[tuple[str, int]] = [("serial", 1), ("local", 1), ("local", 2), ("ray", 1), ("ray", 2)]


def make_function(size: int):
    """A unit of work; a closure, so that it is sent by value to workers that cannot import this file."""

    def multiply(config, scratch):
        import time

        import pandas as pd
        import torch

        matrix = torch.rand(size, size, generator=torch.Generator().manual_seed(config["seed"]))
        began, total = time.perf_counter(), 0.0
        for _ in range(config["products"]):
            total += float((matrix @ matrix)[0, 0])
        return pd.DataFrame({"seconds": [time.perf_counter() - began], "total": [total]})

    return multiply


def products_for(seconds: float) -> int:
    """How many products take that long here, in one thread."""
    torch.set_num_threads(1)
    function = make_function(SIZE)
    function({"seed": 0, "products": 20}, None)
    return int(200 * seconds / float(function({"seed": 0, "products": 200}, None)["seconds"].iloc[0]))


def measure(engine: str, workers: int, units: dict[str, Any]) -> dict[str, Any]:
    """One row of the table."""
    folder, start, cluster, address = tempfile.mkdtemp(prefix="ray-", dir="/tmp"), 0.0, None, None
    try:
        if engine == "ray":
            from ray.cluster_utils import Cluster

            began = time.perf_counter()
            settings = {"num_cpus": 1, "object_store_memory": 80 * 2**20, "include_dashboard": False,
                        "no_monitor": True, "include_log_monitor": False}  # fmt: skip
            cluster = Cluster(initialize_head=True, head_node_args={**settings, "temp_dir": folder})
            for _ in range(workers - 1):
                cluster.add_node(**settings)
            address, start = cluster.address, time.perf_counter() - began
        began = time.perf_counter()
        count = workers if engine == "local" else None
        function, run = make_function(SIZE), Path(folder, "run")
        table = run_units(function, units, run, engine, workers=count, address=address, progress=False)
        wall = time.perf_counter() - began
    finally:
        if cluster is not None:
            cluster.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
    own = float(table["seconds"].sum())
    over = (wall - own / workers) / len(units)
    return {
        "engine": engine, "workers": workers, "units": len(units), "wall_s": wall, "units_per_minute": 60 * len(units) / wall,
        "work_per_unit_s": own / len(units), "overhead_per_unit_s": over, "worker_time_lost_per_unit_s": over * workers,
        "cluster_start_s": start, "total": float(table["total"].sum()),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--units", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=2.0)
    arguments = parser.parse_args()
    os.environ |= {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_AUTH_MODE": "disabled",
    }
    products = products_for(arguments.seconds)
    units = {f"seed{seed}": {"seed": seed, "products": products} for seed in range(arguments.units)}
    rows = []
    for engine, workers in ROWS:
        rows.append(measure(engine, workers, units))
        print(
            {key: round(value, 3) if isinstance(value, float) else value for key, value in rows[-1].items()}, flush=True
        )
    table = pd.DataFrame(rows)
    if table["total"].nunique() != 1:
        raise RuntimeError(f"the engines disagree: {table[['engine', 'workers', 'total']]}")
    table = table.drop(columns="total")
    table["speedup"] = table["units_per_minute"] / table["units_per_minute"].iloc[0]
    print(table.round(2).to_string(index=False))
    record.write_text(RESULTS / "engines.csv", table.round(4).to_csv(index=False))


if __name__ == "__main__":
    main()
