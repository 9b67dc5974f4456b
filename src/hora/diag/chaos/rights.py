"""What some faults need of the machine: each answer is what is lacking and what to do about it, or nothing. Looked up once."""

import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

_OLD_GROUPS, _NEW_GROUPS = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")


def nothing(_: str) -> str:
    """Most faults need nothing."""
    return ""


def _refusal(*words: str) -> str | None:
    """Why a command cannot be run here; None: it can."""
    if shutil.which(words[0]) is None:
        return f"there is no {words[0]}"
    done = subprocess.run(words, capture_output=True, text=True, timeout=20, check=False)
    return None if done.returncode == 0 else (done.stderr.strip().splitlines() or [f"{words[0]} fails"])[-1]


@cache
def to_trace() -> str:
    """System calls that fail, or kill: strace."""
    refusal = _refusal("strace", "-f", "--seccomp-bpf", "-qq", "-o", os.devnull, "-e", "inject=sync:error=EIO", "true")
    return "" if refusal is None else f"{refusal}: install strace, and allow ptrace (kernel.yama.ptrace_scope=0, or CAP_SYS_PTRACE)"


@cache
def to_mount() -> str:
    """Disks and shared memory that are full or read-only: file systems of the job's own, in a mount namespace that ends with it."""
    refusal = _refusal("unshare", "--mount", "mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", "/tmp")
    return "" if refusal is None else f"{refusal}: mounting a small file system needs root (CAP_SYS_ADMIN)"


@cache
def to_make_networks() -> str:
    """Hosts with a network of their own."""
    name = f"hora-probe-{os.getpid()}"
    refusal = _refusal("ip", "netns", "add", name)
    if refusal is None:
        refusal = _refusal("ip", "netns", "exec", name, "ip", "link", "set", "lo", "up")
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return "" if refusal is None else f"{refusal}: network namespaces need iproute2 and root (CAP_NET_ADMIN, CAP_SYS_ADMIN)"


@cache
def to_limit_memory() -> str:
    """A control group whose memory is limited."""
    group = memory_group(f"hora-probe-{os.getpid()}")
    try:
        group.mkdir()
    except OSError as error:
        return f"{error.strerror} for {group.parent}: a control group needs root, and cgroups mounted to be written"
    try:
        return "" if memory_limit(group).exists() else f"{group.parent} has no memory controller: enable it in cgroup.subtree_control"
    finally:
        group.rmdir()


def memory_group(name: str) -> Path:
    """Where a control group of this name is."""
    return (_OLD_GROUPS if _OLD_GROUPS.is_dir() else _NEW_GROUPS) / name


def memory_limit(group: Path) -> Path:
    """The file that holds its limit."""
    return group / ("memory.limit_in_bytes" if _OLD_GROUPS.is_dir() else "memory.max")


@cache
def to_shift_clocks() -> str:
    """A clock that is set, for the processes of the job alone: a small library in C that is loaded before others."""
    if shutil.which("cc") is None or not sys.platform.startswith("linux"):
        return "there is no C compiler, or no Linux: install one that is called cc (Debian: apt install gcc libc6-dev)"
    return ""


@cache
def to_limit_descriptors() -> str:
    """A limit on open files."""
    refusal = _refusal("prlimit", "--nofile=64:64", "true")
    return "" if refusal is None else f"{refusal}: install util-linux"
