root => {
    const beyond = (inner, outer) => inner.right > outer.right + 1 || inner.left < outer.left - 1
    return [...root.querySelectorAll('*')]
        .filter(one => one.checkVisibility())
        .filter(one => beyond(one.getBoundingClientRect(), (one.closest('svg') || root).getBoundingClientRect()))
        .map(one => one.outerHTML.slice(0, 120))
}
