"""The programs of the page on clock cycles, as a user writes them; only the import line names Mainspring."""

import mainspring as trio


async def submit_and_wait(training_client, batch, adam_params):
    fwdbwd_future = await training_client.forward_backward_async(
        batch,
        "cross_entropy",
    )
    fwdbwd_result = await fwdbwd_future

    optim_future = await training_client.optim_step_async(adam_params)
    await optim_future
    return fwdbwd_future, optim_future, fwdbwd_result


async def submit_first_then_wait(training_client, batch, adam_params):
    fwdbwd_future = await training_client.forward_backward_async(
        batch,
        "cross_entropy",
    )
    optim_future = await training_client.optim_step_async(adam_params)

    fwdbwd_result = await fwdbwd_future
    await optim_future
    return fwdbwd_future, optim_future, fwdbwd_result


async def submit_update(training_client, batch, adam_params):
    fwdbwd_future = await training_client.forward_backward_async(
        batch,
        "cross_entropy",
    )
    optim_future = await training_client.optim_step_async(adam_params)
    return fwdbwd_future, optim_future


async def train_pipelined(
    training_client,
    batches: list[list[trio.Datum]],
    learning_rate: float,
):
    if not batches:
        return []

    adam_params = trio.AdamParams(learning_rate=learning_rate)
    current = await submit_update(training_client, batches[0], adam_params)
    results = []

    for next_batch in batches[1:]:
        # Queue the next batch before waiting for the current batch.
        following = await submit_update(training_client, next_batch, adam_params)

        fwdbwd_future, optim_future = current
        results.append(await fwdbwd_future)
        await optim_future
        current = following

    fwdbwd_future, optim_future = current
    results.append(await fwdbwd_future)
    await optim_future
    return results
