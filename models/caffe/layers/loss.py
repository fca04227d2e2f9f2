"""The loss and the accuracy of class scores."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.nn import functional

from multiring.errors import UsageError
from multiring.models.caffe.blob import Shape
from multiring.models.caffe.layer import ForwardLayer, Gradients, Layer, Tensors, register

__all__: list[str] = []

_FULL, _VALID, _BATCH_SIZE, _NONE = range(4)
_LARGEST_LOSS = -math.log(torch.finfo(torch.float32).tiny)


def _rows(
    layer: Layer, scores: torch.Tensor, labels: torch.Tensor, axis: int, ignored: int | None
) -> Tensors:
    """Scores as rows `(n, classes)`, their labels `(n,)` and which labels count."""
    classes = scores.shape[axis]
    rows = scores.movedim(axis, -1).reshape(-1, classes)
    targets = labels.reshape(-1).to(torch.int64)
    counted = torch.ones_like(targets, dtype=torch.bool) if ignored is None else targets != ignored
    wrong = counted & ((targets < 0) | (targets >= classes))
    if wrong.any():
        raise UsageError(
            f"layer {layer.name!r}: label {int(targets[wrong][0])} is outside the {classes} classes of blob "
            f"{layer.param.bottom[0]!r}"
        )
    return rows, torch.where(counted, targets, 0), counted


def _check_labels(layer: Layer, bottoms: Sequence[Shape], axis: int) -> None:
    scores, labels = bottoms
    positions = torch.Size(scores[:axis] + scores[axis + 1 :]).numel()
    found = torch.Size(labels).numel()
    if positions != found:
        raise layer.error(f"scores of shape {scores} have {positions} places, but there are {found} labels")


@register("SoftmaxWithLoss")
class SoftmaxWithLoss(Layer):
    """Mean of -log(probability of the label); a second top gives the probabilities.

    Caffe takes no probability for less than FLT_MIN: a sample's loss is 87.3 at most, its gradient goes on.
    """

    bottoms = (2, 2)
    tops = (1, 2)
    is_loss = True

    def setup(self, bottoms: Sequence[Shape]) -> None:
        param = self.param.loss_param
        self._axis = self.axis(self.param.softmax_param.axis, bottoms[0], "softmax_param", "axis")
        self._ignored = param.ignore_label if param.HasField("ignore_label") else None
        self._mode = param.normalization
        if not param.HasField("normalization") and param.HasField("normalize"):
            self._mode = _VALID if param.normalize else _BATCH_SIZE

    def infer(self, bottoms: Sequence[Shape]) -> list[Shape]:
        _check_labels(self, bottoms, self._axis)
        return [(), bottoms[0]][: len(self.param.top)]

    def forward(self, bottoms: Tensors) -> list[torch.Tensor]:
        scores, labels = bottoms
        self._shape = scores.shape
        rows, self._targets, self._counted = _rows(self, scores, labels, self._axis, self._ignored)
        logarithms = functional.log_softmax(rows, 1)
        losses = -logarithms.gather(1, self._targets.unsqueeze(1)).squeeze(1)
        losses = losses.clamp(max=_LARGEST_LOSS)
        self._probabilities = logarithms.exp()
        self._divisor = self._normalizer(scores)
        tops = [torch.where(self._counted, losses, 0).sum() / self._divisor]
        if len(self.param.top) > 1:
            tops.append(self._unrolled(self._probabilities))
        return tops

    def backward(self, gradients: Gradients, wanted: Sequence[bool]) -> list[torch.Tensor | None]:
        if wanted[1]:
            raise self.error("labels have no gradient", "bottom", 1)
        if not wanted[0] or gradients[0] is None:
            return [None, None]
        rows = self._probabilities.clone()
        rows.scatter_add_(1, self._targets.unsqueeze(1), -torch.ones_like(rows[:, :1]))
        rows *= self._counted.unsqueeze(1)
        rows *= gradients[0] / self._divisor
        return [self._unrolled(rows), None]

    def _unrolled(self, rows: torch.Tensor) -> torch.Tensor:
        others = [extent for axis, extent in enumerate(self._shape) if axis != self._axis]
        return rows.reshape(*others, self._shape[self._axis]).movedim(-1, self._axis).contiguous()

    def _normalizer(self, scores: torch.Tensor) -> float:
        if self._mode == _NONE:
            return 1.0
        if self._mode == _FULL:
            return max(1.0, float(len(self._targets)))
        if self._mode == _BATCH_SIZE:
            return max(1.0, float(torch.Size(scores.shape[: self._axis]).numel()))
        return max(1.0, float(self._counted.sum()))


@register("Accuracy")
class Accuracy(ForwardLayer):
    """Share of places whose label is among the `top_k` highest scores; equal scores count against it."""

    bottoms = (2, 2)

    def setup(self, bottoms: Sequence[Shape]) -> None:
        param = self.param.accuracy_param
        self._axis = self.axis(param.axis, bottoms[0], "accuracy_param", "axis")
        self._ignored = param.ignore_label if param.HasField("ignore_label") else None
        if not 1 <= param.top_k <= bottoms[0][self._axis]:
            raise self.error(
                f"top_k is {param.top_k}, there are {bottoms[0][self._axis]} classes",
                *("accuracy_param", "top_k"),
            )

    def infer(self, bottoms: Sequence[Shape]) -> list[Shape]:
        _check_labels(self, bottoms, self._axis)
        return [()]

    def forward(self, bottoms: Tensors) -> list[torch.Tensor]:
        rows, targets, counted = _rows(self, bottoms[0], bottoms[1], self._axis, self._ignored)
        better = (rows >= rows.gather(1, targets.unsqueeze(1))).sum(1) - 1
        right = counted & (better < self.param.accuracy_param.top_k)
        return [right.sum().to(rows.dtype) / max(1, int(counted.sum()))]
