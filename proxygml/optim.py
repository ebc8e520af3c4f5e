"""Adam for proxies of which a step touches few."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.optim.adam import adam

ROWS = 1024  # updated at a time, so that no copy of all touched rows is made


class RowAdam(torch.optim.Adam):
    """Adam that, where a gradient is sparse, updates the rows that it has and leaves all others alone.

    For `ProxyGMLLoss(sparse_gradient=True)`; dense gradients in the same optimizer are Adam's own. With every row
    touched in every step the two agree. Otherwise a row that a step does not touch keeps its weights and its moments:
    no decay, no momentum that goes on, no fading of the moments, while the bias correction counts all steps.
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
                    sparse[parameter], parameter.grad = parameter.grad, None  # which Adam refuses
        super().step()
        for parameter, gradient in sparse.items():
            parameter.grad = gradient
        return value

    def _step_rows(self, parameter: Tensor, gradient: Tensor, group: dict) -> None:
        state = self.state[parameter]
        if not state:  # under the names that Adam gives them, so that a checkpoint fits both
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        gradient = gradient.coalesce()
        leading = gradient.sparse_dim()
        places = gradient.indices()[0]  # (rows,) of the leading axes made one
        for axis in range(1, leading):
            places = places * parameter.shape[axis] + gradient.indices()[axis]
        every = [tensor.flatten(0, leading - 1) for tensor in (parameter, state["exp_avg"], state["exp_avg_sq"])]
        for rows, slope in zip(places.split(ROWS), gradient.values().split(ROWS), strict=True):
            step = state["step"].clone()  # which `adam` counts up
            touched = [tensor.index_select(0, rows) for tensor in every]
            weights, means, squares = ([tensor] for tensor in touched)
            adam(
                *(weights, [slope], means, squares, [], [step]),
                fused=True,
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )
            for tensor, new in zip(every, touched, strict=True):
                tensor.index_copy_(0, rows, new)
        state["step"] += 1
