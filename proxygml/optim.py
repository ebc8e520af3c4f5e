"""Adam for proxies when a step touches only few of them."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.optim.adam import adam

ROWS = 1024  # rows to update at a time, to avoid a copy of all touched rows


class RowAdam(torch.optim.Adam):
    """Adam that updates only the rows of a sparse gradient.

    For `ProxyGMLLoss(sparse_gradient=True)`; dense gradients in the same optimizer are updated by Adam itself. If every
    step touches every row, the two agree. Otherwise an untouched row keeps its weights and moments: no weight decay, no
    momentum, no decay of the moments, while the bias correction counts all steps.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]  # as Adam's is
        value = None
        if closure is not None:
            with torch.enable_grad():
                value = closure()
        sparse = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.grad.is_sparse:
                    self._step_rows(parameter, parameter.grad, group)
                    sparse[parameter], parameter.grad = parameter.grad, None  # Adam rejects sparse gradients
        super().step()
        for parameter, gradient in sparse.items():
            parameter.grad = gradient
        return value

    def _step_rows(self, parameter: Tensor, gradient: Tensor, group: dict) -> None:
        state = self.state[parameter]
        if not state:  # with Adam's names, so checkpoints fit both
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        gradient = gradient.coalesce()
        axes = gradient.sparse_dim()
        indices = gradient.indices()[0]  # (rows,): into the flattened sparse axes
        for axis in range(1, axes):
            indices = indices * parameter.shape[axis] + gradient.indices()[axis]
        tensors = [tensor.flatten(0, axes - 1) for tensor in (parameter, state["exp_avg"], state["exp_avg_sq"])]
        for rows, values in zip(indices.split(ROWS), gradient.values().split(ROWS), strict=True):
            step = state["step"].clone()  # `adam` increments it
            touched = [tensor.index_select(0, rows) for tensor in tensors]
            weights, means, squares = ([tensor] for tensor in touched)
            adam(
                *(weights, [values], means, squares, [], [step]),
                fused=True,
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )
            for tensor, new in zip(tensors, touched, strict=True):
                tensor.index_copy_(0, rows, new)
        state["step"] += 1
