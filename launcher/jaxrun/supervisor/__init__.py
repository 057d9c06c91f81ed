"""One job from its first process to its exit code: run.py prepares it, supervise.py sees it through."""
