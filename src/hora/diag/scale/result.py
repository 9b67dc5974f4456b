"""What came of a study: points, what the losses said, predictions, and what limits. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from hora.diag.bench.registry import Measurement, Workload
from hora.diag.scale.limits import losses, say_limit
from hora.diag.scale.point import Point
from hora.diag.scale.predict import Prediction, predict
from hora.diag.scale.wire import Wire


@dataclass(frozen=True)
class Result:
    """A study that has been made.

    Attributes:
        name: of the script.
        kind: "strong" or "weak".
        points: by number of ranks.
        wires: patterns fitted to sums, the expected one first.
        predictions: for more ranks.
        tried: the largest number that was measured, predicted from the smaller ones; None where these are too few.
    """

    name: str
    kind: str
    points: Sequence[Point]
    wires: Sequence[Wire]
    predictions: Sequence[Prediction]
    tried: Prediction | None

    @property
    def limit(self) -> str:
        """What keeps more ranks from being as much faster."""
        return say_limit(losses(self.points, self.kind), self.kind, self.points[-1].ranks)

    @property
    def tried_error(self) -> float | None:
        """By which part the prediction for the largest number missed."""
        return None if self.tried is None else self.tried.step_s / self.points[-1].median_s - 1.0

    def measurements(self) -> list[Measurement]:
        """For the rows of a file: steps in milliseconds, and the error of the prediction in percent."""
        found = [
            Measurement(
                Workload(f"scale.{self.name}.{self.kind}", "one step", "ms", point.ranks), "step", tuple(1e3 * s for s in point.step_s)
            )
            for point in self.points
        ]
        for prediction in self.predictions:
            workload = Workload(f"scale.{self.name}.{self.kind}", "one step", "ms", prediction.ranks)
            found.append(
                Measurement(workload, "predicted", tuple(1e3 * s for s in (prediction.low_s, prediction.step_s, prediction.high_s)))
            )
        if self.tried_error is not None:
            workload = Workload(f"scale.{self.name}.{self.kind}", "prediction", "%", self.points[-1].ranks)
            found.append(Measurement(workload, f"scale_prediction_error_{self.points[-1].ranks}", (100 * self.tried_error,)))
        return found


def conclude(name: str, kind: str, points: Sequence[Point], wires: Sequence[Wire], smaller_wires: Sequence[Wire], to: int | None) -> Result:
    """Draws the conclusions; `smaller_wires` are fitted to sums over fewer ranks than were trained on in the end."""
    several = [point for point in points if point.ranks > 1]
    numbers = []
    if to is not None and several:
        ranks = 2 * points[-1].ranks
        while ranks < to:
            numbers.append(ranks)
            ranks *= 2
        numbers.append(to)
    tried = predict(points[:-1], smaller_wires, kind, points[-1].ranks) if len(several) > 1 else None
    return Result(name, kind, points, wires, [predict(points, wires, kind, number) for number in numbers], tried)
