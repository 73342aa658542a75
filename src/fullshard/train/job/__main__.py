"""Entry point of ``python -m fullshard.train.job CONFIG.json``, which is one worker."""

from fullshard.train.job.worker import main

if __name__ == "__main__":
    main()
