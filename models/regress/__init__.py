"""`multiring regress`: trains the one ResNet in every framework and checks that they train alike.

The process that the user starts imports no framework. It starts a job for every framework and number of
ranks (`start`, `worker`), which hands its results over as files; what they mean is decided by pure functions
(`judge`, `baseline`) and shown as a table, JUnit XML and HTML.
"""
