"""Parts of `laps-sd bench chaos`: options, requests, checks afterwards, judgement."""
