"""Panels about the machinery: per panel its expressions and how to read it."""

from panel import Dashboard, Panel, metric, quantile, rate

ENGINES = Dashboard(
    "engines",
    "Slipstream / Engines",
    (
        Panel(
            "Generated tokens per second",
            {"{{run}}": 'run:slipstream_generated_tokens:rate5m{run=~"$run"}'},
            "Response tokens that came back, over all rollout workers.",
        ),
        Panel(
            "Groups at engines, and room",
            {"in flight": metric("generating_groups"), "slots": metric("generation_slots")},
            "In flight below slots: admission or the queue holds them back.",
        ),
        Panel(
            "Idle share of engines",
            {"{{run}}": metric("engine_idle_ratio")},
            "Free slots over the last step. High while the learner waits: admission is the limit.",
            "percentunit",
        ),
        Panel(
            "Idle share of the learner",
            {
                "last step": metric("learner_idle_ratio"),
                "five minutes": 'run:slipstream_learner_idle:ratio_rate5m{run=~"$run"}',
            },
            "Waiting for groups. The autoscaler looks at the same figure.",
            "percentunit",
        ),
        Panel(
            "Attempts at groups",
            {"{{outcome}}": rate("rollouts_total")},
            "`failed` and `lost` are done again; see the dashboard of failures.",
        ),
        Panel(
            "Step time",
            {"p50": quantile(0.5, "step_seconds"), "p95": quantile(0.95, "step_seconds")},
            "Wall clock of a batch step, waiting included.",
            "s",
        ),
        Panel(
            "Learner token slots",
            {"{{kind}}": rate("learner_tokens_total")},
            "What attention computes: real tokens, and padding within buckets of like length.",
        ),
        Panel(
            "Padding",
            {"{{run}}": 'run:slipstream_padding:ratio_rate5m{run=~"$run"}'},
            "Share of those slots that is padding. Above a third: lengths vary much; a larger "
            "learner.token_budget helps.",
            "percentunit",
        ),
        Panel(
            "Requests in vLLM",
            {
                "running": "sum(ray_vllm_num_requests_running)",
                "waiting": "sum(ray_vllm_num_requests_waiting)",
            },
            "From vLLM itself. Waiting should stay 0: the dispatcher never overfills an engine.",
            condition="Ray's metrics are scraped (a cluster with its agents, deploy/prometheus/ray.yml)",
        ),
        Panel(
            "Key-value cache in use",
            {"{{instance}}": "ray_vllm_kv_cache_usage_perc"},
            "Near 1, requests are preempted: more memory, or fewer sequences.",
            "percentunit",
            condition="Ray's metrics are scraped (a cluster with its agents, deploy/prometheus/ray.yml)",
        ),
    ),
)
VERIFIERS = Dashboard(
    "verifiers",
    "Slipstream / Verifiers",
    (
        Panel(
            "Verdicts by status",
            {"{{verifier}} {{status}}": rate("verdicts_total")},
            "Everything but `ok` is out of training, never a zero reward.",
        ),
        Panel(
            "Share that is not ok",
            {"{{verifier}}": 'verifier:slipstream_unscored:ratio_rate5m{run=~"$run"}'},
            "By verifier. Rising: its worker's log has sample and reason.",
            "percentunit",
        ),
        Panel(
            "Groups being scored",
            {"{{run}}": metric("verifying_groups")},
            "Higher than groups generating: verifiers are the bottleneck.",
        ),
        Panel(
            "Time of a verdict",
            {
                "p50 {{verifier}}": quantile(0.5, "verdict_seconds", "verifier"),
                "p95 {{verifier}}": quantile(0.95, "verdict_seconds", "verifier"),
            },
            "Of one completion. Near verifiers.deadline_s they turn into time-outs.",
            "s",
        ),
        Panel(
            "Verifier workers",
            {
                "{{state}}": metric("workers", 'role="verifier"'),
                "target": metric("workers_target", 'role="verifier"'),
            },
            "By state; `starting` for long means that the cluster has no room.",
        ),
    ),
)
SYNC = Dashboard(
    "weight-sync",
    "Slipstream / Weight sync",
    (
        Panel(
            "Mean seconds by stage",
            {"{{stage}}": 'stage:slipstream_sync_seconds:mean_rate5m{run=~"$run"}'},
            "`publish` is the learner's; `stage` happens while generating; generation stands still "
            "from `pause` through `load`; `next_token` is from the pause to the first token after it.",
            "s",
        ),
        Panel(
            "p95 by stage",
            {"{{stage}}": quantile(0.95, "sync_seconds", "stage")},
            "A slow node shows here before it shows in the mean.",
            "s",
        ),
        Panel(
            "Loads by outcome",
            {"{{outcome}}": rate("syncs_total")},
            "`quarantined` means that the probe after the load failed; `failed` that the load did.",
        ),
        Panel(
            "Bytes published per second",
            {"{{run}}": rate("published_bytes_total")},
            "Each version moves once to each node.",
            "Bps",
        ),
        Panel(
            "Parity after the last load",
            {"{{run}}": metric("parity_max_abs")},
            "Largest log-probability difference on the fixed probe, in nats. Its usual size depends "
            "on the dtypes; a jump is a broken load.",
        ),
        Panel(
            "Policy version",
            {"{{run}}": metric("policy_version")},
            "Rises by one per changed step.",
        ),
    ),
)
FAILURES = Dashboard(
    "failures",
    "Slipstream / Failures",
    (
        Panel(
            "Workers by role and state",
            {"{{role}} {{state}}": metric("workers")},
            "`draining` ends by itself; `quarantined` does not.",
        ),
        Panel(
            "Ready against wanted",
            {
                "{{role}} ready": metric("workers", 'state="ready"'),
                "{{role}} wanted": metric("workers_target"),
            },
            "A gap that stays: no room in the cluster, or workers that die.",
        ),
        Panel(
            "Workers lost in an hour",
            {"{{role}} {{reason}}": f"increase({metric('worker_restarts_total')}[1h])"},
            "Compare with supervision.restarts_per_hour.",
        ),
        Panel(
            "Steps by outcome",
            {"{{outcome}}": rate("batches_total")},
            "`non-finite` and `empty` steps change nothing and raise no version.",
        ),
        Panel(
            "Samples by fate",
            {"{{fate}}": rate("samples_total")},
            "`superseded` was done again after a loss.",
        ),
        Panel(
            "Ledger balances",
            {"{{run}}": metric("ledger_balanced")},
            "1 while every sample is accounted for exactly once. 0 is a fault of Slipstream.",
            stat=True,
        ),
        Panel(
            "Checkpoints",
            {"{{outcome}}": f"increase({metric('checkpoints_total')}[1h])"},
            "In the last hour.",
        ),
        Panel(
            "Newest checkpoint",
            {"{{run}}": metric("checkpoint_step")},
            "Its step; -1 before the first. What came after it is lost if the driver dies.",
            stat=True,
        ),
        Panel(
            "Age of the newest checkpoint",
            {"{{run}}": f"time() - ({metric('last_checkpoint_time_seconds')} > 0)"},
            "Since it was saved.",
            "s",
            condition="a checkpoint has been saved",
        ),
        Panel(
            "Time of a checkpoint",
            {"p95": quantile(0.95, "checkpoint_seconds")},
            "Export included; training stands still meanwhile.",
            "s",
            condition="a checkpoint was saved in the last five minutes",
        ),
        Panel(
            "Alerts",
            {"{{alertname}}": 'ALERTS{alertname=~"Slipstream.*"}'},
            "What fires now; each alert says what to do.",
            condition="an alert is pending or firing",
        ),
    ),
)
