"""Stable-Baselines3: a callback that publishes the policy, with the statistics of a VecNormalize beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stable_baselines3.common.callbacks import BaseCallback

from ..engine.publisher import Publisher, writer_of
from ..errors import ProtocolError

if TYPE_CHECKING:
    from stable_baselines3.common.base_class import BaseAlgorithm


class PublishCallback(BaseCallback):
    """Publishes before each rollout, and when the training ends.

    ```python
    with shmsync.Publisher(PublishCallback.weights(model), slots=3) as pub:
        model.learn(100_000, callback=PublishCallback(pub))
    ```

    Args:
        pub: a Publisher of `PublishCallback.weights(model)`, or of `model.policy` alone.

    Raises ProtocolError for a Publisher of something else beside the policy.
    """

    def __init__(self, pub: Publisher) -> None:
        super().__init__()
        self._pub = pub
        names = {key[0] for key in writer_of(pub).arena.manifest.by_key}
        self._policy_alone = "policy" not in names
        if not self._policy_alone and (unknown := names - {"policy", "obs_rms"}):
            raise ProtocolError(
                f"this callback does not know {', '.join(sorted(unknown))}, which is beside the policy; make it of "
                "what the callback publishes: Publisher(PublishCallback.weights(model))"
            )

    @staticmethod
    def weights(model: BaseAlgorithm) -> dict[str, Any]:
        """The policy below "policy"; with a VecNormalize, what normalises the observations below "obs_rms".

        "obs_rms.mean" and "obs_rms.var" are float64, in the shape of an observation; a dict of observations has its
        keys between, as in "obs_rms.image.mean". Workers bind with `sub.bind(model.policy, prefix="policy")`.
        """
        env = model.get_vec_normalize_env()
        statistics = None if env is None or not env.norm_obs else env.obs_rms
        found: dict[str, Any] = {"policy": model.policy}
        if isinstance(statistics, dict):
            found["obs_rms"] = {key: _values(each) for key, each in statistics.items()}
        elif statistics is not None:
            found["obs_rms"] = _values(statistics)
        return found

    def _on_rollout_start(self) -> None:
        self._publish()

    def _on_training_end(self) -> None:
        self._publish()

    def _on_step(self) -> bool:
        return True

    def _publish(self) -> None:
        self._pub.publish(self.model.policy if self._policy_alone else self.weights(self.model))


def _values(statistics: Any) -> dict[str, Any]:
    return {"mean": statistics.mean, "var": statistics.var, "count": statistics.count}
