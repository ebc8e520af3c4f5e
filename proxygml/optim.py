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
        names = ["exp_avg", "exp_avg_sq"] + ["max_exp_avg_sq"] * group["amsgrad"]
        if not state:  # with Adam's names, so checkpoints fit both
            state["step"] = torch.zeros((), dtype=torch.float32)
            state |= {name: torch.zeros_like(parameter) for name in names}
        step = state["step"] = state["step"].to(parameter.device)  # Adam keeps it on the CPU unless `fused`
        gradient = gradient.coalesce()
        axes = gradient.sparse_dim()
        indices = gradient.indices()[0]  # (rows,): into the flattened sparse axes
        for axis in range(1, axes):
            indices = indices * parameter.shape[axis] + gradient.indices()[axis]
        whole = [parameter, *(state[name] for name in names)]
        tensors = [tensor.flatten(0, axes - 1) for tensor in whole]
        for rows, values in zip(indices.split(ROWS), gradient.values().split(ROWS), strict=True):
            touched = [tensor.index_select(0, rows) for tensor in tensors]
            weights, means, squares, *largest = touched
            adam(
                [weights],
                [values],
                [means],
                [squares],
                largest,
                [step.clone()],  # `adam` increments it
                fused=True,
                grad_scale=getattr(self, "grad_scale", None),  # set by GradScaler, as for Adam
                found_inf=getattr(self, "found_inf", None),
                amsgrad=group["amsgrad"],
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                decoupled_weight_decay=group["decoupled_weight_decay"],
                eps=group["eps"],
                maximize=group["maximize"],
            )
            for tensor, new in zip(tensors, touched, strict=True):
                tensor.index_copy_(0, rows, new)
        for tensor, flat in zip(whole, tensors, strict=True):
            if flat.data_ptr() != tensor.data_ptr():  # a copy, because its memory is not contiguous
                tensor.copy_(flat.view_as(tensor))
        step += 1 - getattr(self, "found_inf", torch.zeros_like(step)).to(step.device)
