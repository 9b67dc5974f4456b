"""GPUs, their driver and their links."""

import shutil
import subprocess
from collections.abc import Iterator

from hora.diag.doctor.finding import Finding, ok, warning, wrong
from hora.launch.host import count_gpus

_NVIDIA_SMI_S = 20.0
_MOSTLY_USED = 0.5


def gpus() -> Iterator[Finding]:
    """Whether PyTorch can use what is there."""
    there = count_gpus()
    import torch

    if not torch.cuda.is_available():
        if there:
            yield wrong(
                "GPUs",
                f"{there} are there, but this PyTorch ({torch.__version__}) cannot use them",
                "install a build for CUDA that the driver is new enough for, and see what nvidia-smi says",
            )
        else:
            yield ok("GPUs", "none")
        return
    count = torch.cuda.device_count()
    kinds = {torch.cuda.get_device_name(index) for index in range(count)}
    found = f"{count} x {', '.join(sorted(kinds))}; CUDA {torch.version.cuda}, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"
    yield (
        ok("GPUs", found)
        if len(kinds) == 1
        else warning("GPUs", found, "GPUs of one kind wait for each other least: choose them by CUDA_VISIBLE_DEVICES")
    )
    yield from _memory(count)
    yield from _links(count)


def _memory(count: int) -> Iterator[Finding]:
    import torch

    for index in range(count):
        free, total = torch.cuda.mem_get_info(index)
        if free < _MOSTLY_USED * total:
            found = f"{free / 2**30:.1f} GiB of {total / 2**30:.1f} GiB are free on GPU {index}"
            yield warning("memory of GPUs", found, "another program has the rest (nvidia-smi shows it): end it, or choose other GPUs")


def _links(count: int) -> Iterator[Finding]:
    import torch

    from hora.comm.torch_private import nvlinks_of

    if count < 2:
        return
    links = [nvlinks_of(torch.device("cuda", index)) for index in range(count)]
    unlinked = [(a, b) for a, row in enumerate(links) for b in range(a) if row is not None and not row[b]]
    if None in links:
        yield warning("links between GPUs", "cannot be told", "nvidia-smi topo -m shows them")
    elif unlinked:
        blocked = [(a, b) for a, b in unlinked if not torch.cuda.can_device_access_peer(a, b)]
        yield warning(
            "links between GPUs",
            f"no NVLink between {', '.join(f'{a} and {b}' for a, b in unlinked[:4])}{', nor direct access' if blocked else ''}",
            "sums go over PCIe, or over the host: expect less from more GPUs; see nvidia-smi topo -m",
        )
    else:
        yield ok("links between GPUs", "NVLink between all")


def driver() -> Iterator[Finding]:
    """What the driver says of itself."""
    program = shutil.which("nvidia-smi")
    if program is None or not count_gpus():
        return
    asked = "driver_version,compute_mode,ecc.errors.uncorrected.volatile.total"
    words = [program, f"--query-gpu={asked}", "--format=csv,noheader"]
    answer = subprocess.run(words, capture_output=True, text=True, timeout=_NVIDIA_SMI_S, check=True)
    rows = [[cell.strip() for cell in line.split(",")] for line in answer.stdout.splitlines()]
    yield ok("driver", rows[0][0])
    if any(mode.startswith("Prohibited") for _, mode, _ in rows):
        yield wrong("compute mode", "Prohibited", "nvidia-smi -c DEFAULT")
    spoilt = [str(index) for index, (_, _, errors) in enumerate(rows) if errors.isdigit() and int(errors)]
    if spoilt:
        yield wrong(
            "memory errors", f"that could not be corrected, on GPU {', '.join(spoilt)}", "leave that GPU out, and have it looked at"
        )
