"""Panels about the run and what it learns: per panel its expressions and how to read it."""

from panel import Dashboard, Panel, metric, rate

OVERVIEW = Dashboard(
    "overview",
    "Slipstream / Overview",
    (
        Panel("Step", {"{{run}}": metric("step")}, "Batch steps done.", stat=True),
        Panel(
            "Share done",
            {"{{run}}": f"{metric('step')} / {metric('planned_steps')}"},
            "Of the steps that the run will do.",
            "percentunit",
            stat=True,
        ),
        Panel(
            "What it is doing",
            {"{{state}}": f"{metric('run_state')} == 1"},
            "The state of the run's script: starting, evaluating, training or stopping.",
            stat=True,
        ),
        Panel(
            "Held-out accuracy",
            {"{{run}}": metric("held_out_accuracy_ratio")},
            "pass@1 of the last evaluation; 0 until there was one.",
            "percentunit",
            stat=True,
        ),
        Panel(
            "Bottleneck",
            {"{{stage}}": f"avg_over_time({metric('bottleneck')}[5m])"},
            "Share of recent steps that each stage held up. Give more to the one on top: rollout and "
            "verifier workers can be added live, admission means that the learner is the limit.",
            "percentunit",
        ),
        Panel(
            "Trained tokens per second",
            {"{{run}}": 'run:slipstream_trained_tokens:rate5m{run=~"$run"}'},
            "The figure to raise. Falls with longer waits, longer steps, or masked tokens.",
        ),
        Panel(
            "Time of the training loop",
            {"{{phase}}": rate("phase_seconds_total")},
            "Seconds per second by phase, 1 in all. `wait_for_groups` is idle time; `score`, `train` "
            "and `publish` are work; `paused` is someone's wish.",
        ),
        Panel(
            "Steps per minute",
            {"{{run}}": '60 * run:slipstream_steps:rate5m{run=~"$run"}'},
            "All steps, skipped ones included.",
        ),
        Panel(
            "Reward and accuracy of batches",
            {"reward {{run}}": metric("reward_mean"), "accuracy {{run}}": metric("accuracy_ratio")},
            "Of the trained batches, so noisy and easier than held-out tasks where dynamic sampling "
            "leaves out what is always right.",
        ),
        Panel(
            "Minutes since anything moved",
            {"{{run}}": f"(time() - {metric('last_progress_time_seconds')}) / 60"},
            "Near 0 in a live run. Rising while nothing is paused: the run is stuck.",
        ),
        Panel(
            "Up for",
            {"{{run}}": f"time() - {metric('start_time_seconds')}"},
            "Since the run started, resumes not counted.",
            "s",
            stat=True,
        ),
        Panel(
            "Paused",
            {"{{activity}}": metric("paused")},
            "1 while someone holds generation or training.",
        ),
    ),
)
LEARNING = Dashboard(
    "learning",
    "Slipstream / Learning",
    (
        Panel(
            "Reward",
            {"{{run}}": metric("reward_mean")},
            "Mean reward of the batch's scored samples, after shaping by verifiers.",
        ),
        Panel(
            "Accuracy of batches, held-out accuracy",
            {"batches": metric("accuracy_ratio"), "held out": metric("held_out_accuracy_ratio")},
            "Outcome before shaping. A gap that grows means that trained tasks are memorised.",
            "percentunit",
        ),
        Panel(
            "Loss", {"{{run}}": metric("loss")}, "Of little meaning by itself; NaN or jumps matter."
        ),
        Panel(
            "Entropy",
            {"{{run}}": metric("entropy_nats")},
            "Nats per token. A slow fall is learning; a fall towards 0 is collapse.",
        ),
        Panel(
            "Gradient norm",
            {"{{run}}": metric("gradient_norm")},
            "Before clipping. Compare with learner.optimizer.grad_clip.",
        ),
        Panel(
            "Learning rate",
            {"{{run}}": metric("learning_rate")},
            "Of the last step, by the schedule.",
        ),
        Panel(
            "Engine mismatch",
            {
                "mean": metric("engine_mismatch_mean_abs"),
                "largest": metric("engine_mismatch_max_abs"),
            },
            "|old - behavior| in nats: the two engines under the same weights. About 1e-6 in float32, "
            "a few hundredths in bfloat16. Rising: look at precision and sampling settings.",
        ),
        Panel(
            "Movement",
            {"mean": metric("movement_mean_abs"), "largest": metric("movement_max_abs")},
            "|current - old| in nats: what training moved since the tokens were sampled, which "
            "staleness makes larger. Rising: a lower max_staleness or learning rate.",
        ),
        Panel(
            "Effective sample size",
            {"{{run}}": metric("effective_sample_size_ratio")},
            "Of the uncapped engine-mismatch weights; 1 is none wasted.",
            "percentunit",
        ),
        Panel(
            "Clipped",
            {"below": metric("clip_low_ratio"), "above": metric("clip_high_ratio")},
            "Share of trained tokens whose gradient the clip stopped. A few percent is usual; 0 for "
            "ever means that the clip does nothing, half means that steps are too large.",
            "percentunit",
        ),
        Panel(
            "Capped and rejected by the correction",
            {
                "capped": metric("correction_cap_ratio"),
                "kept low": metric("keep_low_ratio"),
                "kept high": metric("keep_high_ratio"),
            },
            "What TIS caps and IcePop rejects. More than a percent or two: the engines differ.",
            "percentunit",
        ),
        Panel(
            "Response length",
            {"{{run}}": metric("response_length_tokens")},
            "Mean tokens of the batch's samples. Check that reward, not length, is what grows.",
        ),
    ),
)
STALENESS = Dashboard(
    "staleness",
    "Slipstream / Staleness and queues",
    (
        Panel(
            "Trained tokens by versions behind",
            {"{{staleness}}": rate("trained_tokens_total")},
            "Nothing beyond max_staleness. Much at the bound: rollouts run ahead of the learner.",
        ),
        Panel(
            "Mean staleness, and the bound",
            {
                "mean": 'run:slipstream_staleness:mean_rate5m{run=~"$run"}',
                "bound": metric("max_staleness"),
            },
            "Versions behind, over trained tokens.",
        ),
        Panel(
            "Masked tokens by reason",
            {"{{reason}}": rate("masked_tokens_total")},
            "Consumed and kept out of the loss. `stale` should be near 0 under admission control.",
        ),
        Panel(
            "Share of consumed tokens that is masked",
            {"masked": 'run:slipstream_masked_tokens:ratio_rate5m{run=~"$run"}'},
            "Work thrown away, whatever the reason.",
            "percentunit",
        ),
        Panel(
            "Stale share of the last batch",
            {"{{run}}": metric("stale_ratio")},
            "Of the batch's tokens, masked as too old.",
            "percentunit",
        ),
        Panel(
            "Dropped samples by reason",
            {"{{reason}}": rate("dropped_samples_total")},
            "Left without being consumed. `zero_variance` is dynamic sampling at work; `stale` "
            "comes with the drop policy only.",
        ),
        Panel(
            "Share dropped as stale",
            {"{{run}}": 'run:slipstream_stale_dropped:ratio_rate5m{run=~"$run"}'},
            "Of what was generated.",
            "percentunit",
        ),
        Panel(
            "Groups: ready, under way, bound",
            {
                "ready": metric("queue_groups"),
                "under way": metric("under_way_groups"),
                "bound": metric("queue_capacity_groups"),
            },
            "Under way at the bound with few ready: generation or scoring is slow. Many ready: the "
            "learner is.",
        ),
        Panel(
            "Bytes under way",
            {"in use": metric("queue_bytes"), "bound": metric("queue_capacity_bytes")},
            "At the bound, admission waits for bytes, not for versions: raise queue.max_bytes.",
            "bytes",
        ),
        Panel(
            "Oldest ready group",
            {"{{run}}": metric("queue_oldest_seconds")},
            "How long it has waited. Longer than a few steps: order or learner is slow.",
            "s",
        ),
        Panel(
            "Admission blocked",
            {"{{run}}": metric("admission_blocked_ratio")},
            "Share of the last step in which a slot was free and the staleness bound let no group "
            "start. Near 1: more rollout workers would not help.",
            "percentunit",
        ),
        Panel(
            "Groups by fate",
            {"{{fate}}": rate("groups_total")},
            "Admitted is consumed, dropped and failed together, over time.",
        ),
    ),
)
