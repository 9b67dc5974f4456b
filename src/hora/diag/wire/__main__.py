"""A rank of the bench: `python -m hora.diag.wire REQUEST RESULTS`, under `hora run`. Rank 0 writes a line for each point to the file RESULTS."""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import hora
from hora.diag.ranks import WRONG
from hora.diag.wire.measure import Point, WrongSum, measure
from hora.diag.wire.request import Request


def main(request_text: str, results: Path) -> None:
    """Measures what the first argument says."""
    request = Request.parse(request_text)
    here = hora.init(device=None if request.on_gpus else "cpu")

    def append(content: object) -> None:
        if here.rank == 0:
            with results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(content) + "\n")

    def tell(point: Point) -> None:
        append(asdict(point))

    try:
        measure(request, here, tell)
    except WrongSum as error:
        append({WRONG: str(error)})
        raise
    hora.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
