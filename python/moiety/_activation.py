"""What stands between the two linears of experts."""

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class Activation:
    """What stands between the two linears (moiety/gemm/swiglu.h)."""

    kind: str
    alpha: float
    limit: float
    offset: float

    @property
    def gated(self) -> bool:
        return self.kind == "glu"


def Swiglu() -> Activation:
    """silu(gate) * up."""
    return Activation("glu", 1.0, math.inf, 0.0)


def ClampedSwiglu(limit: float) -> Activation:
    """silu(min(gate, limit)) * clamp(up, -limit, limit)."""
    return Activation("glu", 1.0, limit, 0.0)


def QGeglu(alpha: float, limit: float, offset: float) -> Activation:
    """gate * sigmoid(alpha * gate) * (up + offset), clamped as above; GPT-OSS: (1.702, 7, 1)."""
    return Activation("glu", alpha, limit, offset)


def SquaredRelu() -> Activation:
    """relu(x)^2; FC1 has F rows, not 2F."""
    return Activation("relu2", 1.0, math.inf, 0.0)
