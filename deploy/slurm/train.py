"""A job on a cluster of computers run by SLURM: workers are SLURM jobs, which dask-jobqueue writes and submits.

    python deploy/slurm/train.py job.toml --partition compute --workers 4 [--gpu-partition gpu --gpus 2] [--name …]

Other flags are those of `python -m daskcnn.run`, which runs in this process: it has its messages, its answers to
signals and its exit code. `--partition` is SLURM's here: the job's own is `--set train.partition=…`. Needs `pip install
dask-jobqueue`. Run it on a login node, or as a small SLURM job.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile

from dask_jobqueue import SLURMCluster
from dask_jobqueue.slurm import SLURMJob

from daskcnn.run import main as train

PROLOGUE = [
    "export MALLOC_ARENA_MAX=1",
    "export DASK_DISTRIBUTED__ADMIN__TICK__INTERVAL=1s",
    "export DASK_DISTRIBUTED__WORKER__PROFILE__ENABLED=False",
]
"""What a worker's environment has before it starts: one pool of memory, and less of Dask's looking after itself."""


def cpu_cluster(partition: str, *, cores: int, memory: str, walltime: str, **options: object) -> SLURMCluster:
    """A scheduler in this process, and the pattern of its CPU workers: one a SLURM job, with all of its cores."""
    return SLURMCluster(
        queue=partition,
        cores=cores,
        processes=1,
        memory=memory,
        walltime=walltime,
        worker_extra_args=["--resources", "CPU=1"],
        job_script_prologue=PROLOGUE,
        **options,
    )


def gpu_script(scheduler: str, partition: str, *, memory: str, walltime: str) -> str:
    """The script of a SLURM job that is one GPU worker of this scheduler."""
    job = SLURMJob(
        scheduler,
        name="gpu-$SLURM_JOB_ID",
        queue=partition,
        cores=1,
        memory=memory,
        walltime=walltime,
        worker_extra_args=["--resources", "GPU=1"],
        job_script_prologue=PROLOGUE,
        job_extra_directives=["--gres=gpu:1"],
    )
    return str(job.job_script())


def submit(script: str) -> None:
    """Hand it to SLURM."""
    with tempfile.NamedTemporaryFile("w", suffix=".sh") as file:
        file.write(script)
        file.flush()
        subprocess.run(["sbatch", file.name], check=True)


def main() -> None:
    how = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
    parser = argparse.ArgumentParser(description=__doc__, **how)
    parser.add_argument("job")
    parser.add_argument("--partition", required=True)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--cores", type=int, default=16)
    parser.add_argument("--memory", default="32GiB")
    parser.add_argument("--walltime", default="04:00:00")
    parser.add_argument("--gpu-partition")
    parser.add_argument("--gpus", type=int, default=0)
    given, flags = parser.parse_known_args()
    size = {"memory": given.memory, "walltime": given.walltime}
    with cpu_cluster(given.partition, cores=given.cores, **size) as cluster:
        cluster.scale(jobs=given.workers)
        for _ in range(given.gpus):
            submit(gpu_script(cluster.scheduler_address, given.gpu_partition or given.partition, **size))
        workers = f"cpu={given.workers}" + (f",gpu={given.gpus}" if given.gpus else "")
        where = ["--scheduler", cluster.scheduler_address, "--workers", workers, "--wait", "3600"]
        train([given.job, *where, *flags])


if __name__ == "__main__":
    main()
