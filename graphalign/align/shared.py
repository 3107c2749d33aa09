"""What proposal and check have in common, for people; nothing else is imported here, so that reports can say it without torch."""

SHARED = (
    "The check has its own inputs and no join, but shares with the proposal how captures are read and ops are evaluated, and the rule by "
    "which the trainer's tables (cos and sin) are matched to the engine's."
)
