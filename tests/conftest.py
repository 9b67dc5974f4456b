import signal

pytest_plugins = ["hora.testing.plugin"]

# A shell that runs pytest in the background has it, and all it starts, ignore Ctrl-C; the launcher heeds that, as `nohup` asks, and its tests
# would wait for nothing.
for _signum in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1):
    if signal.getsignal(_signum) is signal.SIG_IGN:
        signal.signal(_signum, signal.default_int_handler if _signum is signal.SIGINT else signal.SIG_DFL)
