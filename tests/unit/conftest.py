from hypothesis import settings

# A busy machine is no failure; what hangs is caught by the timeout of each test.
settings.register_profile("hora", deadline=None)
settings.load_profile("hora")
