"""A job as an sbatch script: the scheduler finds the nodes and starts the ranks with `srun`, and they find each other by Slurm's variables.

No launcher of Hora's is there in such a job: Slurm ends it when a rank fails, and keeps its output.
"""

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import fields

from hora import env
from hora.errors import ConfigError, LaunchError
from hora.launch import horovod_words
from hora.launch.options import LaunchOptions
from hora.launch.plan import count_ranks
from hora.launch.target import rank_command
from hora.launch.travel import looks_secret

_SUBMIT_S = 60.0
_SAVE_NOTICE_S = 120
_DEFAULTS = {field.name: field.default for field in fields(LaunchOptions)}
_SUBMITTED = re.compile(r"(\d+)(?:;.*)?")


def require_plain(options: LaunchOptions) -> None:
    """Refuses what a job of Slurm's cannot be asked for here.

    Raises:
        ConfigError: names each option.
    """
    secrets = [name for name in options.exports if looks_secret(name)]
    checks = (
        (
            secrets,
            f"-x {', '.join(secrets)}: it would stand in the script; set it in the shell that submits, whose variables Slurm passes on",
        ),
        (options.hosts, "-H and --hostfile: Slurm chooses the hosts; say how many with --nnodes"),
        (options.node_rank, "--node-rank: Slurm numbers the nodes"),
        (options.mpi, "--mpi: start the script with Slurm's own MPI, `srun python -m hora.mpi`"),
        (options.counts_host, "--nproc-per-node auto: this machine may be another than those of the job; give a number"),
        (options.master_port is not None, "--master-port: it is derived from the number of the job"),
        (options.elastic, "--max-ranks and --host-discovery: Slurm chooses the hosts, once"),
        (options.max_restarts, "--max-restarts: have Slurm do it, `#SBATCH --requeue` and `scontrol requeue`"),
        (
            options.deadlines.given,
            "--deadline: no launcher watches the ranks there; a collective that waits too long (HORA_TIMEOUT_S) ends the job",
        ),
        (
            options.output_dir is not None,
            "--output-dir: Slurm keeps the output; name a file for each rank with `--slurm-option=--output=%t`",
        ),
        (options.log_dir is not None, "--log-dir: Slurm keeps the output, in a file beside the script"),
        (options.quiet, "--quiet: Slurm keeps the output of all ranks"),
        (
            options.key_file is not None,
            f"--key-file: the ranks have the key in their user's state directory; name another one with `-x {env.STATE_DIR}=DIR`",
        ),
        (options.master_addr != _DEFAULTS["master_addr"], "--master-addr: rank 0 is on the first node that Slurm chooses"),
        (options.grace_s != _DEFAULTS["grace_s"], "--grace: have Slurm give notice earlier, with `--slurm-option=--signal=TERM@SECONDS`"),
        (
            options.join_timeout_s != _DEFAULTS["join_timeout_s"],
            f"--join-timeout: ranks wait for each other as long as `-x {env.TIMEOUT_S}=SECONDS` says",
        ),
    )
    if problems := [text for asked, text in checks if asked]:
        raise ConfigError("with --slurm there can be no " + "; no ".join(problems))


def batch_script(options: LaunchOptions, directory: str, environ: Mapping[str, str]) -> str:
    """The script for `sbatch` that runs the job in `directory`.

    Raises:
        ConfigError: the target is not there, or an option does not go with Slurm.
    """
    require_plain(options)
    ranks = count_ranks(options, cores=1, gpus=0)
    command = rank_command(options.target, options.args, options.kind, environ)
    exports = dict(options.exports) | _own_variables(options)
    exports |= horovod_words.common_variables({**environ, **exports})
    name = re.sub(r"[^A-Za-z0-9_.-]", "_", os.path.basename(options.target)) or "hora"
    bind = {"none": "none", "core": "cores", "numa": "ldoms"}[options.bind]
    lines = [
        "#!/bin/bash",
        f"#SBATCH --job-name={name}",
        f"#SBATCH --nodes={options.num_nodes}",
        f"#SBATCH --ntasks-per-node={ranks}",
        f"#SBATCH --signal=TERM@{_SAVE_NOTICE_S}",
        *(f"#SBATCH {word}" for word in options.slurm_options),
        "",
        f"cd -- {shlex.quote(directory)}",
        *(f"export {name}={shlex.quote(value)}" for name, value in exports.items()),
        # Bash becomes srun, which ends all ranks when one fails, and whose exit code is the job's.
        f"exec srun --kill-on-bad-exit=1 --label --unbuffered --cpu-bind={bind} {shlex.join(command)}",
    ]
    return "\n".join(lines) + "\n"


def submit(script: str) -> str:
    """Gives a script to `sbatch`; returns the number of the job.

    Raises:
        ConfigError: there is no `sbatch` here.
        LaunchError: it did not take the job; the message quotes it.
    """
    program = shutil.which("sbatch")
    if program is None:
        raise ConfigError("there is no sbatch in PATH; submit from a node of the cluster, or leave --submit out to see the script")
    try:
        answer = subprocess.run([program, "--parsable"], input=os.fsencode(script), capture_output=True, timeout=_SUBMIT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"sbatch did not answer: {error}") from error
    told, complaint = (text.decode(errors="replace").strip() for text in (answer.stdout, answer.stderr))
    found = _SUBMITTED.fullmatch(told)
    if answer.returncode or found is None:
        raise LaunchError(f"sbatch did not take the job: {complaint or told}")
    return found[1]


def read_options(words: Sequence[str]) -> tuple[str, ...]:
    """Options for `#SBATCH` lines, such as `--partition=gpu`.

    Raises:
        ConfigError: a word is none, or would begin another line.
    """
    wrong = [word for word in words if not word.startswith("-") or "\n" in word or "\r" in word]
    if wrong:
        raise ConfigError(f"--slurm-option must be followed by an option of sbatch, such as --partition=gpu, but by {wrong[0]!r}")
    return tuple(words)


def _own_variables(options: LaunchOptions) -> dict[str, str]:
    exact = {} if options.logical_ranks is None else {env.EXACT: str(options.logical_ranks)}
    return exact | ({} if options.shared_dir is None else {env.SHARED_DIR: os.path.abspath(options.shared_dir)})
