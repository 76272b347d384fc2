"""What the figures mean that `batch explain`, `weights explain`, `report` and `demo` print: their help says it."""

from __future__ import annotations

STEP = """Figures of the step; means and shares are over the trained tokens of its batch.

\b
step, learning_rate        the version it made, and the rate it was made with
optimiser_steps            minibatches applied; 0 when nothing was trained
sequences, trained_tokens  what took part
loss, gradient_norm        the norm is the largest of the minibatches, unclipped
clip_fraction              share of tokens whose ratio the objective clipped
entropy                    of the policy, in nats
approx_kl, reference_kl    from the step's anchor (mean of r - 1 - log r), and
                           from the reference policy where there is one
ratio_mean, ratio_max      new probability of a token by the anchor's
gap_mean, gap_max          trainer's log-prob under the weights it began with,
                           less the sampler's; staleness included
fresh_tokens               tokens sampled under those very weights
fresh_gap_max              largest gap among them: exactly 0 where trainer and
                           sampler have the same numerics_id
"""

GROUPS = """Groups that no batch holds, by reason.

\b
discarded (by the controller; odradek task list: whose):
  infrastructure  a fault of ours, as often as it may be tried again
  deadline        too few members had ended
  cancelled, refused, policy_version   the task; the detail says why
left out (by assembly):
  flat            all members alike in lane.spread_component
  infrastructure  fewer than two members with a usable reward
  undecodable     a member's records make no session
  consent, origin what may not be trained on
"""
