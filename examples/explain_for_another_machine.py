"""What would run on a machine that is not here, and what stands in the way; the answer needs neither torch nor a GPU.

Run it: `python examples/explain_for_another_machine.py`, or with the name of a preset or of a JSON file.
"""

from __future__ import annotations

import sys

from moe_core.environment import PRESETS, Environment, load_environment
from moe_core.manager import BackendManager, default_manager
from moe_core.planner import decide
from moe_core.quant import FP8_BLOCK128
from moe_core.request import LayerRequest

#: The shape of one layer of a large model with FP8 weights, over eight ranks.
REQUEST = LayerRequest(
    num_experts=256,
    top_k=8,
    hidden_size=7168,
    intermediate_size=2048,
    quant=FP8_BLOCK128,
    ep_size=8,
)
#: A machine described by hand: what is not listed is not installed.
BY_HAND = Environment(device_type="cuda", arch="sm90", device_name="my H100", packages={"torch": "2.11.0"})


def explain(manager: BackendManager, environment: Environment) -> str:
    """The decision for one machine, as text: each spec with its reasons, then the pairs, then the order."""
    return decide(manager, REQUEST, environment).explain()


def main() -> None:
    """Explain for the machine by hand, or for the one that is named."""
    environment = load_environment(sys.argv[1]) if len(sys.argv) > 1 else BY_HAND
    print(explain(default_manager(), environment))
    if "torch" in sys.modules:
        print("(something imported torch)")
    print(f"presets: {', '.join(PRESETS)}")


if __name__ == "__main__":
    main()
