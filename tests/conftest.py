pytest_plugins = ["hora.testing.plugin"]
